"""The command line: fast help, discovery, and one message with exit code 2 for whatever the user can mend."""

import importlib
import os
import re
import signal
import socket
import subprocess
import sys
from importlib.metadata import EntryPoint, version
from pathlib import Path

import numpy as np
import pytest

from moonshard.serving import cli, entry
from moonshard.serving.commands.checks.ports import check_kv_ports_suffice, check_ports_are_free
from moonshard.serving.commands.options import API_KEY_VARIABLE, api_key_of
from moonshard.serving.commands.serve import ChildCommands
from moonshard.serving.config.keys import Config, ConfigError, embedded_model_path
from moonshard.serving.config.reading import leaves, load_config, toml_value
from moonshard.serving.deploy.children.limits import limits_of
from moonshard.serving.deploy.startup import STARTUP_ERRORS, jax_environment, programs_folder, startup_message
from moonshard.sharding.shape import MeshShape


def moonshard(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moonshard.serving.cli", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def greet(name: str = "you") -> int:
    """Greet somebody."""
    sys.stdout.write(f"hello {name}\n")
    return 7


GREET = EntryPoint(name="greet", value=f"{__name__}:greet", group=cli.ENTRY_POINT_GROUP)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> dict[str, EntryPoint]:
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__, sys.modules[greet.__module__]))
    return {point.name: point for point in cli.BUILT_IN} | {"greet": GREET}


def test_help_imports_nothing_heavy():
    code = "import sys; from moonshard.serving.cli import main; main(['--help']); print(*sys.modules, sep='\\n')"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout
    modules = set(shown.splitlines())
    assert "usage: moonshard COMMAND [options]" in modules
    assert not modules & {"jax", "grpc", "fastapi", "httpx", "numpy", "uvloop", "rich.console"}


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"moonshard {version('moonshard')}\n"


def test_help_names_every_command_with_its_purpose(commands: dict[str, EntryPoint]):
    text = cli.help_text(commands)
    assert re.search(r"^  greet +Greet somebody\.$", text, re.MULTILINE)
    assert all(f"  {name} " in text for name in ("serve", "gateway", "prefill", "decode", "worker", "chat", "score"))


def test_an_installed_command_runs_with_its_arguments_and_gives_the_exit_code(
    commands: dict[str, EntryPoint], capsys: pytest.CaptureFixture[str]
):
    assert cli.run(["greet", "--name", "me"], commands) == 7
    assert capsys.readouterr().out == "hello me\n"


def test_an_installed_command_cannot_replace_a_built_in_one(monkeypatch: pytest.MonkeyPatch):
    fake = EntryPoint(name="serve", value="nowhere:serve", group=cli.ENTRY_POINT_GROUP)
    monkeypatch.setattr(cli, "entry_points", lambda group: (fake, GREET))
    found = cli.found_commands()
    assert found["serve"] in cli.BUILT_IN
    assert found["greet"] is GREET


@pytest.mark.parametrize("name", [point.name for point in cli.BUILT_IN])
def test_every_command_explains_its_options(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: moonshard {name}" in capsys.readouterr().out


def test_a_misspelt_command_gets_the_nearest(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["srve"]) == 2
    assert capsys.readouterr().err == "moonshard: unknown command 'srve'; did you mean serve?\n"


@pytest.mark.parametrize("command", ["serve", "gateway", "prefill", "decode", "worker"])
def test_configuration_faults_end_with_one_message_and_exit_code_2(command: str):
    ended = moonshard(command, "--set", "max_slots=1", "--set", "gateway.port=x")
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr == (
        "moonshard: max_slots: unknown key; did you mean prefill.max_slots or decode.max_slots?\n"
        "           gateway.port: expected `int`, got 'x'\n"
    )


@pytest.mark.parametrize("command", ["serve", "gateway", "prefill", "decode", "worker"])
def test_an_unknown_option_is_answered_with_the_key_that_it_may_be(command: str, capsys: pytest.CaptureFixture[str]):
    asked = [
        command,
        "--max-slots",
        "3",
        "--kv.block-size=3",
        "--confg",
        "x",
        "--max-model-len",
        "4",
        "--set",
        "a.b=--c",
    ]
    assert cli.main(asked) == 2
    no_such = "there is no such option"
    lists_all = "`moonshard keys` lists all keys"
    slots = "--set prefill.max_slots=VALUE or --set decode.max_slots=VALUE"
    assert capsys.readouterr().err.splitlines() == [
        f"moonshard: --max-slots: {no_such}; did you mean {slots}? {lists_all}",
        f"           --kv.block-size: {no_such}; did you mean --set kv.block_size=VALUE? {lists_all}",
        f"           --confg: {no_such}; did you mean --config?",
        f"           --max-model-len: {no_such}; keys are set with --set KEY=VALUE, and `moonshard keys` lists them",
    ]


def test_a_folder_given_as_an_option_is_told_where_it_goes(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["serve", "--model", "x"]) == 2
    assert capsys.readouterr().err == "moonshard: --model: it is given without a name: moonshard serve MODEL\n"


def test_ctrl_c_amid_the_imports_ends_quietly():
    """In the middle of one, where Python's own handler would raise within whatever is being imported."""
    code = """
import os, signal, sys, types
class Importing(types.ModuleType):
    def __getattr__(self, name):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("as C extensions do")
        return lambda: 0
sys.modules["moonshard.serving.cli"] = Importing("cli")
from moonshard.serving.entry import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_an_interrupt_is_an_exception_again_once_a_command_runs(monkeypatch: pytest.MonkeyPatch):
    def interrupted() -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return 0

    point = EntryPoint(name="interrupted", value="tests.serving.commands.test_cli:interrupted", group="none")
    monkeypatch.setattr(cli, "found_commands", lambda: {"interrupted": point})
    monkeypatch.setattr(EntryPoint, "load", lambda point: interrupted)
    monkeypatch.setattr(sys, "argv", ["moonshard", "interrupted"])
    assert entry.main() == 130


def served_with(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Config:
    """The configuration with which `serve` would start its children."""
    from moonshard.serving.commands import serve

    seen: list[Config] = []

    async def supervise(commands: ChildCommands, *_: object, **__: object) -> int:
        seen.append(commands.config)
        return 0

    monkeypatch.setattr(serve, "supervise", supervise)
    assert cli.main(["serve", "--set", "gateway.grpc_port=0", *arguments]) == 0
    return seen[0]


def test_serve_takes_model_port_host_and_mode_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    folder = tmp_path / 'my "model"'
    folder.symlink_to(embedded_model_path())
    named = ["--port", "0", "--host", "localhost", "--mode", "aggregated"]
    as_set = [f"model.path={toml_value(folder)}", "gateway.port=0", "gateway.host=localhost", "mode=aggregated"]
    assert served_with(monkeypatch, str(folder), *named) == load_config(None, ["gateway.grpc_port=0", *as_set])
    assert served_with(monkeypatch, "--port", "0").model.path == embedded_model_path()


def test_keys_are_listed_with_default_and_meaning_as_a_file_may_have_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    assert cli.main(["keys"]) == 0
    listed = capsys.readouterr().out
    lines = dict(line.split(" =", 1) for line in listed.splitlines())
    assert [name.removeprefix("# ") for name in lines] == [key for key, _ in leaves(load_config(None))]
    assert not [name for name, rest in lines.items() if "  # " not in rest], "a key without a comment beside it"
    assert lines["gateway.tenant_tokens_per_minute"].endswith("# of prompts and completions; none: as many as it likes")
    file = tmp_path / "all.toml"
    file.write_text(listed)
    assert load_config(file) == load_config(None)


def test_keys_may_be_asked_for_by_their_beginning(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["keys", "kv.sl"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "kv.slab_bytes",
        "kv.slots_per_handoff",
    ]
    assert cli.main(["keys", "slab_bytes"]) == 2
    assert capsys.readouterr().err == "moonshard: slab_bytes: no key begins like this; did you mean kv.slab_bytes?\n"


@pytest.mark.parametrize(
    ("given", "variable", "key"), [("a", "b", "a"), (None, "b", "b"), (None, "", None), ("", "b", None)]
)
def test_the_api_key_is_the_options_else_the_environments(
    given: str | None, variable: str, key: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(API_KEY_VARIABLE, variable)
    assert api_key_of(given) == key


def test_an_api_key_that_no_header_can_carry_is_refused_without_being_told(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=r"^--api-key: expected printable ASCII$"):
        api_key_of("schl\u00fcssel")
    monkeypatch.setenv(API_KEY_VARIABLE, "line\nbreak")
    with pytest.raises(ConfigError, match=rf"^{API_KEY_VARIABLE}: expected printable ASCII$"):
        api_key_of(None)


def test_every_named_startup_error_exists():
    for module, name in STARTUP_ERRORS:
        assert issubclass(getattr(importlib.import_module(module), name), ValueError | OSError)


def test_only_startup_errors_are_explained_also_when_a_task_group_wraps_them():
    class Special(ConfigError):
        pass

    assert startup_message(ExceptionGroup("tasks", [ValueError("ours"), Special(["a", "b"])])) == "a\nb"
    assert startup_message(ValueError("ours")) is None


def test_a_port_in_use_is_refused_naming_the_key():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as raised:
            check_ports_are_free(load_config(None, [f"gateway.grpc_port={port}", "gateway.port=0"]))
    (fault,) = raised.value.faults
    assert fault == (
        f"gateway.grpc_port: cannot listen on 127.0.0.1:{port}: Address already in use;"
        " --set gateway.grpc_port=0 takes any free port"
    )
    check_ports_are_free(load_config(None, [f"gateway.grpc_port={port}", "gateway.port=0"]))  # free again


def test_a_range_of_kv_ports_too_short_for_what_listens_on_one_machine_is_refused():
    short, store = ["kv.ports=[20100, 20106]"], ["kv.store.enabled=true", "kv.store.dram_bytes=16777216"]
    with pytest.raises(ConfigError, match=r"kv\.ports: 8 are needed for 4 processes of workers, 20100 to 20106 are 7"):
        check_kv_ports_suffice(load_config(None, short), num_processes=4)
    check_kv_ports_suffice(load_config(None, short), num_processes=3)
    with pytest.raises(ConfigError, match=r"9 are needed for the store and 2 processes of workers, 20100"):
        check_kv_ports_suffice(load_config(None, [*short, *store]), num_processes=2)
    for unused in ('mode="aggregated"', 'kv.transport="grpc"'):
        check_kv_ports_suffice(load_config(None, [*short, *store, unused]), num_processes=9)


def test_serve_says_that_the_kv_ports_are_too_few_before_it_starts_a_worker(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["serve", "--set", "kv.ports=[20100, 20102]", "--set", "gateway.port=0"]) == 2
    assert (
        capsys.readouterr().err
        == "moonshard: kv.ports: 4 are needed for 2 processes of workers, 20100 to 20102 are 3\n"
    )


def test_serve_says_that_the_key_file_cannot_be_read_before_it_starts_a_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("moonshard.serving.commands.serve.supervise", None)
    path = tmp_path / "keys.toml"
    free = ["--set", "gateway.port=0", "--set", "gateway.grpc_port=0"]
    assert cli.main(["serve", "--set", f"gateway.keys={path}", *free]) == 2
    assert capsys.readouterr().err == f"moonshard: gateway.keys: {path}: No such file or directory\n"


@pytest.mark.parametrize(
    ("command", "key"), [("worker", "worker.port"), ("prefill", "prefill.port"), ("decode", "decode.port")]
)
def test_a_workers_port_in_use_is_refused_naming_the_key(
    command: str, key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    mode = "aggregated" if command == "worker" else "disaggregated"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main([command, "--set", f"mode={mode}", "--set", f"{key}={port}"]) == 2
    fault = f"moonshard: {key}: cannot listen on 127.0.0.1:{port}: Address already in use"
    assert capsys.readouterr().err == f"{fault}; --set {key}=0 takes any free port\n"


@pytest.mark.parametrize(
    ("command", "mode", "fault"),
    [
        (
            "worker",
            "disaggregated",
            "`moonshard worker` is for aggregated; "
            "the workers of disaggregated are `moonshard prefill` and `moonshard decode`",
        ),
        (
            "prefill",
            "aggregated",
            "`moonshard prefill` is for disaggregated; the workers of aggregated are `moonshard worker`",
        ),
        (
            "decode",
            "aggregated",
            "`moonshard decode` is for disaggregated; the workers of aggregated are `moonshard worker`",
        ),
    ],
)
def test_a_worker_of_the_other_mode_is_refused(command: str, mode: str, fault: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main([command, "--set", f"mode={mode}"]) == 2
    assert capsys.readouterr().err == f"moonshard: mode: {fault}\n"


def test_serve_starts_the_workers_of_its_mode_in_the_order_of_their_roles():
    counts = ["prefill.replicas=2", "decode.replicas=3"]
    names = ["prefill 0", "prefill 1", "decode 0", "decode 1", "decode 2"]
    assert list(ChildCommands(load_config(None, counts)).workers) == names
    aggregated = ChildCommands(load_config(None, [*counts, "mode=aggregated"]))
    assert list(aggregated.workers) == ["worker 0", "worker 1", "worker 2"]


def test_a_child_is_given_the_whole_configuration_on_its_command_line():
    fence = "kv.network_fence=a cable"
    config = load_config(None, ["decode.max_slots=5", "gateway.port=0", "prefill.port=50099", "worker.host=::1", fence])
    commands = ChildCommands(config)
    for name, key in (("prefill 0", "prefill"), ("decode 0", "decode")):
        worker = reread(commands.workers[name](None), key)
        assert (worker.worker.host, getattr(worker, key).port) == ("127.0.0.1", 0)
        assert (worker.decode.max_slots, worker.kv) == (5, config.kv)
    gateway = reread(commands.gateway(["127.0.0.1:7", "127.0.0.1:8"], None), "gateway")
    assert (gateway.gateway.workers, gateway.gateway.port) == (("127.0.0.1:7", "127.0.0.1:8"), 0)


@pytest.mark.parametrize(("host", "called"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]")])
def test_workers_of_serve_know_before_it_is_there_where_its_gateway_hears_of_them(host: str, called: str):
    commands = ChildCommands(load_config(None, ["gateway.registry=grpc", f"gateway.registry_host={host}"]))
    gateway = reread(commands.gateway(["127.0.0.1:7"], None), "gateway").gateway
    assert (gateway.workers, gateway.registry_host, gateway.registry_port > 0) == ((), host, True)
    for name, command in (("prefill 0", "prefill"), ("decode 0", "decode")):
        worker = reread(commands.workers[name](None), command)
        assert worker.worker.gateways == (f"{called}:{gateway.registry_port}",)


def test_serve_hears_workers_at_loopback_or_everywhere():
    with pytest.raises(ConfigError, match=r"^gateway\.registry_host: the workers of `serve` are at 127\.0\.0\.1"):
        ChildCommands(load_config(None, ["gateway.registry=grpc", "gateway.registry_host=10.0.0.3"]))


def test_serve_starts_an_end_of_the_store_that_its_workers_know_of_unless_one_is_named():
    keys = ["kv.store.enabled=true", "kv.store.dram_bytes=20000000", "kv.store.master=127.0.0.1:1"]
    commands = ChildCommands(load_config(None, keys))
    store = reread(commands.beside["store"](None), "store").kv.store
    assert (store.dram_bytes, store.master) == (20000000, "127.0.0.1:1")
    assert store.client
    assert store.client.startswith("127.0.0.1:")
    assert {reread(worker(None), name.split()[0]).kv.store for name, worker in commands.workers.items()} == {store}
    assert not ChildCommands(load_config(None, [*keys, "kv.store.client=127.0.0.1:9"])).beside
    assert not ChildCommands(load_config(None, keys[1:2])).beside


@pytest.mark.parametrize(
    ("mode", "name", "command", "key"),
    [
        ("aggregated", "worker 0", "worker", "worker"),
        ("disaggregated", "prefill 0", "prefill", "prefill"),
        ("disaggregated", "decode 0", "decode", "decode"),
    ],
)
def test_a_restarted_child_takes_the_place_of_the_one_before(mode: str, name: str, command: str, key: str):
    commands = ChildCommands(load_config(None, [f"mode={mode}"]))
    config = reread(commands.workers[name]({"address": "127.0.0.1:7007"}), command)
    assert getattr(config, key).port == 7007
    gateway = reread(commands.gateway([], {"http": "http://127.0.0.1:7008", "grpc": "127.0.0.1:7009"}), "gateway")
    assert (gateway.gateway.port, gateway.gateway.grpc_port) == (7008, 7009)


def test_a_restarted_worker_may_have_been_given_the_default_port_of_another_role():
    commands = ChildCommands(load_config(None))
    port = load_config(None).decode.port
    assert reread(commands.workers["prefill 0"]({"address": f"127.0.0.1:{port}"}), "prefill").prefill.port == port


def reread(argv: list[str], command: str) -> Config:
    assert argv[:4] == [sys.executable, "-m", "moonshard.serving.cli", command]
    assert argv[4::2] == ["--set"] * len(argv[4::2])
    return load_config(None, argv[5::2])


def test_everything_ends_within_30_s_of_a_signal_by_default():
    limits = limits_of(load_config(None))
    assert 20 < limits.gateway_drain_s < limits.drain_s < 28


@pytest.mark.parametrize(
    ("environ", "flags"),
    [
        ({}, "--xla_force_host_platform_device_count=4"),
        ({"XLA_FLAGS": "--xla_x=1"}, "--xla_x=1 --xla_force_host_platform_device_count=4"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, None),
    ],
)
def test_jax_gets_a_device_for_each_place_in_the_mesh_unless_the_user_has_said_how_many(
    environ: dict[str, str], flags: str | None
):
    assert jax_environment(MeshShape(data=2, tensor=2), environ).get("XLA_FLAGS") == flags


def test_the_compile_cache_is_the_users_choice_first():
    added = jax_environment(MeshShape(), {"XDG_CACHE_HOME": "/caches"})
    assert added["JAX_COMPILATION_CACHE_DIR"] == "/caches/moonshard/jax"
    assert "XLA_FLAGS" not in added
    assert "JAX_COMPILATION_CACHE_DIR" not in jax_environment(MeshShape(), {"JAX_COMPILATION_CACHE_DIR": "/mine"})


def test_programs_are_kept_beside_jaxs_where_the_user_has_said_where_these_are():
    assert programs_folder({"XDG_CACHE_HOME": "/caches"}) == Path("/caches/moonshard/programs")
    assert programs_folder({"JAX_COMPILATION_CACHE_DIR": "/mine"}) == Path("/mine/moonshard")
    bucket = {"JAX_COMPILATION_CACHE_DIR": "gs://mine", "XDG_CACHE_HOME": "/caches"}
    assert programs_folder(bucket) == Path("/caches/moonshard/programs")
    assert programs_folder({"JAX_ENABLE_COMPILATION_CACHE": "False"}) is None
    assert programs_folder({"JAX_ENABLE_COMPILATION_CACHE": "true", "HOME": "/h"}) is not None


def fake_score(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Put a stand-in where the command finds the model's `score`; returns what it was called with."""
    calls: list[tuple] = []

    def score(folder: Path, tokens: list[int], dtype: str) -> np.ndarray:
        calls.append((folder, list(tokens), dtype))
        return np.arange(len(tokens) * 2, dtype=np.float32).reshape(-1, 2)

    monkeypatch.setitem(sys.modules, "moonshard.models.score", type(sys)("moonshard.models.score"))
    monkeypatch.setattr(sys.modules["moonshard.models.score"], "score", score, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return calls


def test_score_saves_the_logits_at_exactly_the_path_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = fake_score(monkeypatch)
    (tmp_path / "ids.txt").write_text("3, 1\n4")
    out = tmp_path / "logits"
    arguments = ["--model", str(tmp_path), "--out", str(out)]
    assert cli.main(["score", *arguments, "--tokens-file", str(tmp_path / "ids.txt")]) == 0
    assert calls == [(tmp_path, [3, 1, 4], "float32")]
    assert np.load(out).shape == (3, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "1,x"], "--tokens: 'x' is no token id"),
        (["--tokens", "1,-2"], "--tokens: '-2' is no token id"),
        ([], "--tokens: give either --tokens or --tokens-file"),
        (["--tokens", "1", "--out", "/nowhere/x.npy"], "--out /nowhere/x.npy: cannot be written"),
        (["--tokens-file", "/nowhere"], "--tokens-file /nowhere: "),
    ],
)
def test_score_refuses_bad_input_before_it_computes(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    calls = fake_score(monkeypatch)
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "x.npy")]
    assert cli.main(["score", "--model", str(tmp_path), *out, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert calls == []


def test_score_names_a_token_outside_the_vocabulary(tmp_path: Path):
    model = str(Path(__file__).parents[2] / "fixtures" / "kimi_k2")
    ended = moonshard("score", "--model", model, "--tokens", "99999999", "--out", str(tmp_path / "x.npy"))
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert "99999999 is outside the vocabulary" in ended.stderr
