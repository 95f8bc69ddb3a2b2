"""Configuration: every fault is named at once, with the key that was meant, and nothing is silently ignored."""

from dataclasses import replace
from pathlib import Path

import pytest

from moonshard.serving.config.addresses import default_worker_addresses
from moonshard.serving.config.faults import announced_faults
from moonshard.serving.config.keys import (
    EMBEDDED_MODEL_NAME,
    Config,
    ConfigError,
    TlsConfig,
    embedded_model_path,
)
from moonshard.serving.config.listing import listed_keys
from moonshard.serving.config.reading import as_overrides, leaves, load_config
from moonshard.sharding.rules import DECODE, PREFILL
from moonshard.sharding.shape import MeshShape

UNSET_NUMBERS = {  # by default
    "model.max_context_tokens",
    "gateway.tenant_tokens_per_minute",
    "kv.num_blocks",
    "kv.slots_per_handoff",
}


def faults(path: Path | None = None, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        load_config(path, overrides)
    return raised.value.faults


def write(folder: Path, text: str) -> Path:
    path = folder / "moonshard.toml"
    path.write_text(text)
    return path


def test_every_key_has_a_default_and_the_embedded_model_is_served():
    config = load_config(None)
    assert config.model.path == embedded_model_path()
    assert config.model.name == EMBEDDED_MODEL_NAME
    assert (config.mode, config.gateway.port, config.kv.num_blocks) == ("disaggregated", 8000, None)


def test_a_file_sets_keys_and_overrides_win_over_it(tmp_path: Path):
    path = write(tmp_path, "[decode]\nmax_slots = 8\nmesh = {data = 2}\n[kv]\nnum_blocks = 'auto'\n")
    config = load_config(path, ["decode.max_slots=4", "decode.mesh.tensor=2", "model.name=mine"])
    assert config.decode.max_slots == 4
    assert config.decode.mesh == MeshShape(data=2, tensor=2)
    assert (config.kv.num_blocks, config.model.name) == (None, "mine")


def test_the_model_is_named_after_its_folder_and_a_relative_path_starts_at_the_file(tmp_path: Path):
    (tmp_path / "my-model").mkdir()
    config = load_config(write(tmp_path, "model.path = 'my-model'"))
    assert (config.model.path, config.model.name) == (tmp_path / "my-model", "my-model")


def test_an_override_may_be_a_toml_list_or_a_bare_string():
    config = load_config(None, ["gateway.workers=['10.0.0.1:1', 'b:2']", "gateway.host=0.0.0.0"])
    assert config.gateway.workers == ("10.0.0.1:1", "b:2")
    assert config.gateway.host == "0.0.0.0"


def test_each_role_has_rules_of_its_own_and_a_file_may_change_them(tmp_path: Path):
    config = load_config(write(tmp_path, "[decode.rules]\nheads = []\nkv_tokens = ['tensor']\n"))
    assert config.prefill.rules == PREFILL
    assert config.decode.rules == replace(DECODE, heads=(), kv_tokens=("tensor",))


def test_a_context_holds_at_least_a_prompt_and_an_answer():
    assert faults(None, "model.max_context_tokens=1") == ("model.max_context_tokens: expected `int` >= 2, got 1",)


def test_all_faults_are_reported_together(tmp_path: Path):
    path = write(
        tmp_path, "mode = 'agregated'\nmax_slots = 3\n[gateway]\nport = 70000\nhots = 'x'\n[kv]\nnum_blocks = 0\n"
    )
    assert faults(path, "decode.replicas=two", "nonsense") == (
        "--set nonsense: expected key=value, for example decode.max_slots=32",
        "mode: expected one of aggregated, disaggregated, got 'agregated'; did you mean aggregated?",
        "max_slots: unknown key; did you mean prefill.max_slots or decode.max_slots?",
        "gateway.port: expected `int` <= 65535, got 70000",
        "gateway.hots: unknown key; did you mean gateway.host?",
        "kv.num_blocks: expected `int` >= 1, got 0",
        "decode.replicas: expected `int`, got 'two'",
    )


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        (
            "worker.gateways=['gateways.local:1']",
            "worker.host: gateways.local:1 may be another machine, which reaches no worker at 127.0.0.1",
        ),
        (
            "worker={gateways=['localhost:1'], announced_host='0.0.0.0'}",
            "worker.announced_host: gateways reach no worker at 0.0.0.0; name the address of this machine",
        ),
    ],
)
def test_a_worker_that_gateways_would_not_reach_is_refused_and_nobody_else(override: str, fault: str):
    assert announced_faults(load_config(None, [override]).worker) == [fault]


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("gateway.port=true", "gateway.port: expected `int`, got True"),
        ("gateway.port=8000.0", "gateway.port: expected `int`, got 8000.0"),
        ("gateway.queue_timeout_s=nan", "gateway.queue_timeout_s: expected `float` > 0.0, got nan"),
        ("gateway.workers=[1]", "gateway.workers: expected `str`, got [1]"),
        ("gateway.workers=['host']", "gateway.workers: expected host:port, got 'host'"),
        (
            "gateway.allowed_origins=['chat.example.com']",
            "gateway.allowed_origins: expected *, null or an origin such as https://chat.example.com, "
            "got 'chat.example.com'",
        ),
        (
            "gateway.allowed_hosts=['https://api.example.com']",
            "gateway.allowed_hosts: expected *, a name or name:port, in lower case, got 'https://api.example.com'",
        ),
        ("worker.gateways=['host']", "worker.gateways: expected host:port, got 'host'"),
        ("worker.gateways=['localhost:1', 'localhost:1']", "worker.gateways: 'localhost:1' is named twice"),
        ("worker.announced_host='http://me'", "worker.announced_host: expected a host, got 'http://me'"),
        (
            "gateway={registry='grpc', workers=['127.0.0.1:1']}",
            'gateway.workers: with gateway.registry = "grpc" workers name themselves; leave it empty',
        ),
        (
            "gateway={registry='grpc', registry_port=8000}",
            "gateway.registry_port: 8000 is the port of a front too; take another",
        ),
        ("gateway.keep_alive_s=0", "gateway.keep_alive_s: expected `float` > 0.0, got 0"),
        ("gateway.max_half_open_connections=0", "gateway.max_half_open_connections: expected `int` >= 1, got 0"),
        ("gateway.port=50051", "gateway.grpc_port: 50051 is gateway.port too; HTTP and gRPC need one each"),
        ("decode.mesh.data=0", "decode.mesh.data: expected `int` >= 1, got 0"),
        ("decode.mesh.foo=1", "decode.mesh.foo: unknown key; [decode.mesh] has data, expert, tensor, pipe"),
        ("decode.mesh=8", "decode.mesh: expected a table with data, expert, tensor, pipe"),
        ("decode.rules.head=['tensor']", "decode.rules.head: unknown key; did you mean decode.rules.heads?"),
        (
            "decode.rules.experts=['pipe']",
            "decode.rules.experts: expected a list of expert or tensor, got ['pipe']",
        ),
        ("prefill.rules.experts=['expert', 'expert']", "prefill.rules.experts names expert twice"),
        (
            "prefill.rules.experts=['tensor']",
            "prefill.rules.expert_ffw: tensor is in rules.experts too, and cuts the same arrays",
        ),
        (
            "decode.redundant_experts=4",
            "decode.redundant_experts: 4 copies, but no decode.expert_loads that says of which",
        ),
        (
            "decode={mesh={tensor=3}, rules={kv_tokens=['tensor']}}",
            "decode.rules.kv_tokens: mesh.tensor = 3 does not divide kv.block_size (64)",
        ),
        ("decode.max_slots.x=1", "decode.max_slots: expected `int`, got {'x': 1}"),
        ("decod.max_slots=1", "decod: unknown key; did you mean decode?"),
        ("worker.grpc_port=1", "worker.grpc_port: unknown key; did you mean gateway.grpc_port?"),
        ("max_slot=1", "max_slot: unknown key; did you mean prefill.max_slots or decode.max_slots?"),
        (
            "model.dtype=bf16",
            "model.dtype: expected one of auto, float32, bfloat16, got 'bf16'; did you mean bfloat16?",
        ),
        ("model.path=''", "model.path: expected a path, got ''"),
        ("prefill.chunk_tokens=100", "prefill.chunk_tokens: 100 is not a multiple of kv.block_size (64)"),
        ("gateway.workers=['a:1', 'b:2', 'a:1']", "gateway.workers: 'a:1' is named twice"),
        ("gateway.worker_silence_s=0", "gateway.worker_silence_s: expected `float` > 0.0, got 0"),
        (
            "routing.local_prefill_max_tokens=-1",
            "routing.local_prefill_max_tokens: expected `int` >= 0, got -1",
        ),
        ("routing.max_attempts=0", "routing.max_attempts: expected `int` >= 1, got 0"),
        ("routing.failover_wait_s=-0.1", "routing.failover_wait_s: expected `float` >= 0.0, got -0.1"),
        ("prefill.port=-1", "prefill.port: expected `int` >= 0, got -1"),
        ("prefill.port=50072", "decode.port: 50072 is prefill.port too; they need one each"),
        ("decode.port=65536", "decode.port: expected `int` <= 65535, got 65536"),
        ("prefill.max_slots=0", "prefill.max_slots: expected `int` >= 1, got 0"),
        ("kv.slab_bytes=0", "kv.slab_bytes: expected `int` >= 1, got 0"),
        ("kv.slab_bytes=1e9", "kv.slab_bytes: expected `int`, got 1000000000.0"),
        ("kv.slots_per_handoff=0", "kv.slots_per_handoff: expected `int` >= 1, got 0"),
        ("kv.lease_s=0", "kv.lease_s: expected `float` > 0.0, got 0"),
        (
            "kv.lease_s=30",
            "kv.lease_s: 30 includes the wait for a decode worker, and must be more than gateway.queue_timeout_s (30)",
        ),
        ("kv.quarantine_s=-1", "kv.quarantine_s: expected `float` > 0.0, got -1"),
        ("kv.transfer_timeout_s=1e9", "kv.transfer_timeout_s: expected `float` <= 86400.0, got 1000000000.0"),
        ("kv.host=''", "kv.host: expected `str` of length >= 1, got ''"),
        ("kv.ports=[17000]", "kv.ports: expected `array` of length 2, got [17000]"),
        ("kv.ports=[17009, 17000]", "kv.ports: 2 are needed for a worker, 17009 to 17000 are 0"),
        ("kv.ports=[17000, 17000]", "kv.ports: 2 are needed for a worker, 17000 to 17000 are 1"),
        ("kv.ports=[0, 17000]", "kv.ports: expected `int` >= 1 - at `$[0]`, got [0, 17000]"),
        ("kv.allow_unauthenticated=1", "kv.allow_unauthenticated: expected `bool`, got 1"),
        ("kv.network_fence=' '", "kv.network_fence: expected `str` matching regex '\\\\S', got ' '"),
        ("kv.transport=rdma", "kv.transport: expected one of mooncake, grpc, got 'rdma'"),
        ("kv.transport=inproc", "kv.transport: expected one of mooncake, grpc, got 'inproc'"),
        ("tls.cert=''", "tls.cert: expected a path, got ''"),
        ("tls.cert=/nowhere/x.pem", "tls.cert: /nowhere/x.pem: No such file or directory"),
        ("tls.ca=/", "tls.ca: /: Is a directory"),
        ("tls.crt=x", "tls.crt: unknown key; did you mean tls.cert?"),
    ],
)
def test_a_bad_value_is_refused_naming_its_key(override: str, fault: str):
    assert faults(None, override) == (fault,)


def test_gateways_elsewhere_reach_no_worker_that_listens_or_says_it_is_on_loopback():
    elsewhere = ("mode=aggregated", "worker.gateways=['gateways.local:1']")
    unreached = {"worker.host": ["worker.announced_host=me"]}
    unreached["worker.announced_host"] = ["worker.host=10.0.0.1", "worker.announced_host=localhost"]
    for key, told in unreached.items():
        (fault,) = announced_faults(load_config(None, [*elsewhere, *told]).worker)
        assert fault.startswith(f"{key}: gateways.local:1 may be another machine")
    reached = load_config(None, [*elsewhere, "worker.host=0.0.0.0", "worker.announced_host=me"])
    assert not announced_faults(reached.worker)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_slots_that_the_partitions_cannot_share_are_refused(role: str):
    (fault,) = faults(None, f"{role}.mesh={{data=3}}")
    assert fault.startswith(f"{role}.max_slots: 16 cannot be shared out equally among the 3 partitions")


@pytest.mark.parametrize(
    "override", ["prefill.mesh={data=3}", "prefill.port=50072", "kv.lease_s=30", "worker.host=0.0.0.0"]
)
def test_what_only_prefill_workers_need_binds_no_aggregated_deployment(override: str):
    assert load_config(None, ["mode=aggregated", override]).mode == "aggregated"
    assert faults(None, override)


def test_files_of_tls_come_together(tmp_path: Path):
    write(tmp_path, "x")
    assert faults(None, f"tls.cert={tmp_path / 'moonshard.toml'}") == (
        "tls.key: not set, but tls.cert is; [tls] needs all three files or none",
        "tls.ca: not set, but tls.cert is; [tls] needs all three files or none",
    )


def test_every_path_of_a_file_starts_at_the_file_and_that_of_an_override_at_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here):
        folder.mkdir()
        (folder / "one.pem").touch()
    path = write(there, "[tls]\ncert = 'one.pem'\nkey = 'one.pem'\nca = 'auto'\n")
    monkeypatch.chdir(here)
    tls = load_config(path, ["tls.ca=one.pem"]).tls
    assert (tls.cert, tls.key, tls.ca) == (there / "one.pem", there / "one.pem", here / "one.pem")
    assert load_config(write(there, "[tls]\ncert = 'none'\nca = 'auto'\n")).tls == TlsConfig()


def test_two_ports_are_enough_for_a_worker():
    assert load_config(None, ["kv.ports=[17000, 17001]"]).kv.ports == (17000, 17001)


def test_a_link_and_a_snapshot_of_the_hub_are_named_as_they_were_given(tmp_path: Path):
    snapshot = tmp_path / "models--moonshotai--Kimi-K2" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (tmp_path / "my-kimi").symlink_to(snapshot)
    for path, name in (
        (snapshot, "moonshotai/Kimi-K2"),
        (tmp_path / "my-kimi", "my-kimi"),
        (f"{tmp_path}/my-kimi/", "my-kimi"),
    ):
        assert load_config(None, [f"model.path={path}"]).model.name == name
    (tmp_path / "config.toml").write_text('model.path = "."')
    assert load_config(tmp_path / "config.toml").model.name == tmp_path.name


def test_none_is_no_name_and_no_statement():
    config = load_config(None, ["tls.cert=none", "kv.network_fence=none", "kv.host=auto", "kv.ports=none"])
    assert (config.tls.cert, config.kv.network_fence, config.kv.host, config.kv.ports) == (None, None, None, None)


def test_a_model_folder_that_is_not_there_is_named(tmp_path: Path):
    (fault,) = faults(None, f"model.path={tmp_path / 'nope'}")
    assert fault.startswith(f"model.path: {tmp_path / 'nope'} is not a folder")


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (['speculation.method=["eagle3", "mtp"]'], "speculation.method: eagle3 and mtp are two draft models; name one"),
        (['speculation.method=["lookup", "lookup"]'], "speculation.method: lookup is named twice"),
        (
            ["speculation.method=lookup", "speculation.path=/drafts"],
            "speculation.path: only eagle3 has a folder of its own; see speculation.method",
        ),
        (
            ["speculation.method=eagle3", "decode.mesh={pipe=2}"],
            "speculation.method: eagle3 needs all layers in one stage, and decode.mesh.pipe is 2",
        ),
        (["speculation.method=eagle3", "speculation.path=/no/drafts"], "speculation.path: /no/drafts is not a folder"),
        (
            ["speculation.method=ngram"],
            "speculation.method: expected none, grammar, lookup, eagle3, mtp or a list of several, got 'ngram'",
        ),
        (
            ['speculation.method=["none", "lookup"]'],
            "speculation.method: expected a list of grammar or lookup or eagle3 or mtp, got ['none', 'lookup']",
        ),
        (["speculation.num_tokens=none"], "speculation.num_tokens: expected auto or a number, got 'none'"),
        (["speculation.num_tokens=4"], "speculation.num_tokens: expected `int` <= 3, got 4"),
    ],
)
def test_guesses_that_cannot_be_had_are_named(overrides: list[str], fault: str):
    assert fault in faults(None, *overrides)


def test_another_model_needs_a_draft_of_its_own(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    told = faults(None, f"model.path={tmp_path}", "speculation.method=eagle3")
    assert told == ("speculation.path: eagle3 needs the folder of a draft for this model",)


NAMED = {"none": (), "lookup": ("lookup",), '["grammar", "eagle3"]': ("grammar", "eagle3")}


@pytest.mark.parametrize(("said", "methods"), NAMED.items())
def test_one_method_of_guessing_may_be_named_or_several(said: str, methods: tuple[str, ...]):
    assert load_config(None, [f"speculation.method={said}"]).speculation.methods == methods


@pytest.mark.parametrize(
    ("content", "fault"),
    [(b"a = \n", "line 1"), (b"\xff", "not UTF-8 at byte 0"), (None, "No such file or directory")],
)
def test_an_unreadable_file_is_one_clear_fault(tmp_path: Path, content: bytes | None, fault: str):
    path = tmp_path / "x.toml"
    if content is not None:
        path.write_bytes(content)
    (text,) = faults(path)
    assert text.startswith(f"--config {path}: ")
    assert fault in text


ORIGINS = ["*", "null", "https://a.example", "http://localhost:3000", "http://[::1]:80", "chrome-extension://abc"]
NO_ORIGINS = ["https://a.example/", "https://A.example", "https://a@b.example", "https://*.example", "a.example", "//a"]
HOSTS = ["*", "a.example", "a.example:80", "[::1]", "[::1]:80", "10.0.0.1"]
NO_HOSTS = ["a.example/", "A.example", "a b", "::1", "a:b", "a:", "*.example", "http://a"]


def test_names_that_a_browser_could_not_send_are_refused():
    def faults(key: str, values: list[str]) -> list[str]:
        try:
            load_config(None, [f"gateway.{key}={values}"])
        except ConfigError as error:
            return list(error.faults)
        return []

    assert faults("allowed_origins", ORIGINS) == []
    assert faults("allowed_hosts", HOSTS) == []
    assert len(faults("allowed_origins", NO_ORIGINS)) == len(NO_ORIGINS)
    assert len(faults("allowed_hosts", NO_HOSTS)) == len(NO_HOSTS)


def test_overrides_carry_a_whole_configuration_to_another_process(tmp_path: Path):
    odd = tmp_path / 'a "quoted" \\ \x7f [folder] = ü'
    odd.mkdir()
    (tmp_path / "x.pem").touch()
    config = load_config(
        None,
        [
            *(
                f"model.path={odd}",
                "decode.mesh={expert=2, tensor=4}",
                "prefill.rules.heads=[]",
                "gateway.workers=['h:1']",
                "gateway.allowed_origins=['*', 'https://a.example:1']",
                "kv.num_blocks=77",
            ),
            *("kv.allow_unauthenticated=true", "kv.ports=[17000, 17009]", 'kv.network_fence=vlan "7", no route'),
            *(f"tls.{name}={tmp_path / 'x.pem'}" for name in ("cert", "key", "ca")),
        ],
    )
    config = replace(config, gateway=replace(config.gateway, queue_timeout_s=1e-7))
    assert load_config(None, as_overrides(config)) == config


WITHOUT_END = [key for key, value in leaves(load_config(None)) if type(value) is int or key in UNSET_NUMBERS]


@pytest.mark.parametrize("key", WITHOUT_END)
def test_a_number_without_end_is_refused_by_name(key: str):
    assert faults(None, f"{key}={10**18}")[0].startswith(f"{key}: expected `int` <= ")


def test_a_mesh_of_more_devices_than_any_is_refused():
    (fault,) = faults(None, "decode.mesh={ data = 4096, tensor = 4096 }", "decode.max_slots=4096")
    assert fault == "decode.mesh: data=4096 tensor=4096 is 16777216 devices; at most 4096"


def test_no_key_is_forgotten_when_a_configuration_is_handed_over():
    handed = dict(override.split("=", 1) for override in as_overrides(load_config(None)))
    assert list(handed) == [key for key, _ in leaves(load_config(None))]
    assert {"mode", "model.path", "decode.mesh.pipe", "kv.transport"} <= handed.keys()


def test_the_readme_lists_every_key_with_its_default():
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    rows = dict(line[3:].split("` | ", 1) for line in readme.splitlines() if line.startswith("| `") and "` | " in line)
    for key, value in leaves(load_config(None)):
        table, _, _ = key.rpartition(".")
        is_axis = table.endswith((".mesh", ".rules"))
        row = rows[table if is_axis else key]
        if isinstance(value, int | float) and not is_axis:
            assert row.startswith(f"`{str(value).lower()}` |"), key


@pytest.mark.parametrize(("written", "meant"), [("auto", "auto"), ("none", None), ("2.5", 2.5), ("3", 3.0)])
def test_a_bound_on_ttft_is_a_number_or_ours_or_none_at_all(written: str, meant: object):
    config = load_config(None, [f"routing.ttft_slo_s={written}"])
    assert config.routing.ttft_slo_s == meant
    assert load_config(None, as_overrides(config)) == config


def test_readme_and_list_of_keys_spell_each_default_of_none_alike():
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    spelt = {key.name: (key.default or "").strip('"') for key in listed_keys()}
    absent = [key for key, value in leaves(load_config(None)) if value is None]
    assert {spelt[key] for key in absent} == {"auto", "none"}
    for key in absent:
        assert f"\n| `{key}` | `{spelt[key]}` |" in readme
        assert load_config(None, [f"{key}={spelt[key]}"]) == load_config(None)


def test_a_gateway_looks_for_one_worker_of_each_role_unless_told():
    config = load_config(None, ["prefill.port=1", "decode.port=2", "worker.port=3"])
    assert default_worker_addresses(config) == ("127.0.0.1:1", "127.0.0.1:2")
    aggregated = load_config(None, ["mode=aggregated", "worker.port=3", "worker.host=::1"])
    assert default_worker_addresses(aggregated) == ("[::1]:3",)


def test_configurations_are_immutable():
    config: Config = load_config(None)
    with pytest.raises(AttributeError):
        config.gateway.port = 1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (
            ["decode.mesh.tensor=2", "decode.processes=3"],
            "decode.processes: 3 do not divide the 2 devices of decode.mesh",
        ),
        (
            ["mode=disaggregated", "decode.mesh.tensor=2", "prefill.processes=2", "prefill.mesh.pipe=3"],
            "prefill.processes: 2 do not divide the 3 devices of prefill.mesh",
        ),
        (
            ["decode.mesh.pipe=3", "decode.mesh.tensor=2"],
            "decode.processes: 2 with 3 devices each would cut through the 3 stages of 2 of decode.mesh",
        ),
        (
            ["decode.mesh.tensor=2", "kv.store.enabled=true", "kv.store.host_bytes=1000"],
            "decode.processes: with kv.store.enabled each process has whole partitions, and 2 do not divide the 1 of",
        ),
        (
            ["decode.mesh.data=2", "decode.mesh.pipe=2", "kv.store.enabled=true", "kv.store.host_bytes=1000"],
            "decode.processes: with kv.store.enabled a gang has no stages, and decode.mesh.pipe is 2",
        ),
        (["decode.mesh.data=2", "worker.host=10.0.0.1"], "worker.host: 10.0.0.1 opens the collectives of a gang"),
    ],
)
def test_what_a_gang_cannot_do_is_refused_by_its_key(overrides: list[str], fault: str):
    with pytest.raises(ConfigError) as raised:
        load_config(None, ["mode=aggregated", "decode.processes=2", *overrides])
    assert any(told.startswith(fault) for told in raised.value.faults)


def test_a_gang_is_let_through_where_it_can_serve():
    asked = ["mode=aggregated", "decode.processes=2", "decode.mesh.data=2", "prefill.processes=3"]
    assert load_config(None, asked).decode.processes == 2  # [prefill] has no worker then
    for stages in (["decode.mesh.pipe=2"], ["decode.mesh.pipe=2", "decode.mesh.tensor=2", "decode.processes=4"]):
        assert load_config(None, [*asked, "decode.mesh.data=1", *stages]).decode.mesh.pipe == 2
    fenced = [*asked, "worker.host=10.0.0.1", "kv.network_fence=nft rules of the rack"]
    assert load_config(None, fenced).worker.host == "10.0.0.1"
