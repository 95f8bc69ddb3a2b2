"""Configuration: every fault is named at once, with the key that was meant, and nothing is silently ignored."""

from dataclasses import replace
from pathlib import Path

import pytest

from moonshard.serving.config import EMBEDDED_MODEL_NAME, Config, ConfigError, embedded_model_path
from moonshard.serving.config_file import as_overrides, leaves, load_config
from moonshard.sharding.shape import MeshShape


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
    assert (config.mode, config.gateway.port, config.kv.num_blocks) == ("aggregated", 8000, None)


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


def test_a_context_holds_at_least_a_prompt_and_an_answer():
    assert faults(None, "model.max_context_tokens=1") == ("model.max_context_tokens: expected `int` >= 2, got 1",)


def test_all_faults_are_reported_together(tmp_path: Path):
    path = write(
        tmp_path, "mode = 'agregated'\nmax_slots = 3\n[gateway]\nport = 70000\nhots = 'x'\n[kv]\nnum_blocks = 0\n"
    )
    assert faults(path, "decode.replicas=two", "nonsense") == (
        "--set nonsense: expected key=value, for example decode.max_slots=32",
        "mode: expected one of aggregated, disaggregated, got 'agregated'; did you mean aggregated?",
        "max_slots: unknown key; did you mean decode.max_slots?",
        "gateway.port: expected `int` <= 65535, got 70000",
        "gateway.hots: unknown key; did you mean gateway.host?",
        "kv.num_blocks: expected `int` >= 1, got 0",
        "decode.replicas: expected `int`, got 'two'",
    )


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("gateway.port=true", "gateway.port: expected `int`, got True"),
        ("gateway.port=8000.0", "gateway.port: expected `int`, got 8000.0"),
        ("gateway.queue_timeout_s=nan", "gateway.queue_timeout_s: expected `float` > 0.0, got nan"),
        ("gateway.workers=[1]", "gateway.workers: expected `str`, got [1]"),
        ("gateway.workers=['host']", "gateway.workers: expected host:port, got 'host'"),
        ("gateway.port=50051", "gateway.grpc_port: 50051 is gateway.port too; HTTP and gRPC need one each"),
        ("decode.mesh.data=0", "decode.mesh.data: expected `int` >= 1, got 0"),
        ("decode.mesh.foo=1", "decode.mesh.foo: unknown key; [decode.mesh] has data, expert, tensor, pipe"),
        ("decode.mesh=8", "decode.mesh: expected a table with data, expert, tensor, pipe"),
        ("decode.max_slots.x=1", "decode.max_slots: expected `int`, got {'x': 1}"),
        ("decod.max_slots=1", "decod: unknown key; did you mean decode?"),
        ("worker.grpc_port=1", "worker.grpc_port: unknown key; did you mean gateway.grpc_port?"),
        ("max_slot=1", "max_slot: unknown key; did you mean decode.max_slots?"),
        (
            "model.dtype=bf16",
            "model.dtype: expected one of auto, float32, bfloat16, got 'bf16'; did you mean bfloat16?",
        ),
        ("model.path=''", "model.path: expected a path, got ''"),
        ("kv.block_size=48", "prefill.chunk_tokens: 512 is not a multiple of kv.block_size (48)"),
        ("mode=disaggregated", "mode: disaggregated is not served yet; use aggregated"),
    ],
)
def test_a_bad_value_is_refused_naming_its_key(override: str, fault: str):
    assert faults(None, override) == (fault,)


def test_slots_that_the_partitions_cannot_share_are_refused():
    (fault,) = faults(None, "decode.mesh={data=3}")
    assert fault.startswith("decode.max_slots: 16 cannot be shared out equally among the 3 partitions")


def test_a_model_folder_that_is_not_there_is_named(tmp_path: Path):
    (fault,) = faults(None, f"model.path={tmp_path / 'nope'}")
    assert fault.startswith(f"model.path: {tmp_path / 'nope'} is not a folder")


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


def test_overrides_carry_a_whole_configuration_to_another_process(tmp_path: Path):
    odd = tmp_path / 'a "quoted" \\ \x7f [folder] = ü'
    odd.mkdir()
    config = load_config(
        None, [f"model.path={odd}", "decode.mesh={expert=2, tensor=4}", "gateway.workers=['h:1']", "kv.num_blocks=77"]
    )
    config = replace(config, gateway=replace(config.gateway, queue_timeout_s=1e-7))
    assert load_config(None, as_overrides(config)) == config


def test_no_key_is_forgotten_when_a_configuration_is_handed_over():
    handed = dict(override.split("=", 1) for override in as_overrides(load_config(None)))
    assert list(handed) == [key for key, _ in leaves(load_config(None))]
    assert {"mode", "model.path", "decode.mesh.pipe", "kv.transport"} <= handed.keys()


def test_the_readme_lists_every_key_with_its_default():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    rows = dict(line[3:].split("` | ", 1) for line in readme.splitlines() if line.startswith("| `") and "` | " in line)
    for key, value in leaves(load_config(None)):
        table, is_axis, _ = key.partition(".mesh.")
        row = rows[f"{table}.mesh" if is_axis else key]
        if isinstance(value, int | float) and not is_axis:
            assert row.startswith(f"`{value}` |"), key


def test_configurations_are_immutable():
    config: Config = load_config(None)
    with pytest.raises(AttributeError):
        config.gateway.port = 1  # pyright: ignore[reportAttributeAccessIssue]
