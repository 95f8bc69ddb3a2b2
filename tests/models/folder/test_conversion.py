"""A folder in another number format: what is written is what the format says, and opens as the same model."""

import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from moonshard.models.folder.checkpoint import Checkpoint, CheckpointError
from moonshard.models.folder.conversion import MATRICES, Target, convert
from moonshard.models.folder.quantization import check_formats
from moonshard.models.folder.writing import Piece, Planned, write_checkpoint, write_pieces
from moonshard.models.formats.known import FORMATS as FORMATS_BY_NAME
from moonshard.models.formats.stored import ROWS_AT_A_TIME, Reader
from moonshard.models.registry import open_model
from moonshard.models.score import Scorer
from moonshard.models.spec import ModelError
from moonshard.serving.cli import main
from tests.agreement import FIXTURES, LOGIT_TOLERANCE
from tests.quantised import int4_values
from tests.wrapped import KEPT, VISION, wrapped

pytestmark = pytest.mark.xdist_group("jax")
PLAIN = FIXTURES / "kimi_k2"
FORMATS: tuple[Target, ...] = ("int4", "fp8", "int8")
EXPERT = "model.layers.1.mlp.experts.3.gate_proj"
DENSE = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Target, Path]:
    """The plain folder in every format."""
    found: dict[Target, Path] = {to: tmp_path_factory.mktemp(to) / "out" for to in FORMATS}
    for to, out in found.items():
        convert(PLAIN, to, out)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    checkpoint = Checkpoint.open(folder)
    return {name: checkpoint.stored(name).tobytes() for name in checkpoint.names}


def fp8_values(checkpoint: Checkpoint, name: str) -> np.ndarray:
    codes, scales = (checkpoint.tensor(f"{name}.{part}") for part in ("weight", "weight_scale_inv"))
    rows, columns = codes.shape
    return codes.astype(np.float32) * scales.repeat(128, 0)[:rows].repeat(128, 1)[:, :columns]


def test_int4_is_of_routed_experts_alone_and_each_value_is_the_nearest_that_its_scale_allows(folders):
    found, plain = Checkpoint.open(folders["int4"]), Checkpoint.open(PLAIN)
    for name in plain.names:
        assert found.has(name) is (".experts." not in name)
    values, before = (
        array.astype(np.float32) for array in (int4_values(found, EXPERT), plain.tensor(f"{EXPERT}.weight"))
    )
    steps = found.tensor(f"{EXPERT}.weight_scale").astype(np.float32).repeat(32, axis=1)
    inside = (before > -8 * steps) & (before < 7.5 * steps)
    assert np.abs(values - before)[inside].max() <= 0.51 * steps.max()
    assert found.tensor(f"{EXPERT}.weight_shape").tolist() == list(before.shape)


def test_fp8_is_of_every_matrix_but_tables_and_routers_with_deepseek_s_names(folders):
    found, plain = Checkpoint.open(folders["fp8"]), Checkpoint.open(PLAIN)
    quantised = {name for name in plain.names if MATRICES.search(name)}
    assert {name for name in found.names if found.dtype(name) == "F8_E4M3"} == quantised
    kept = {name for name in plain.names if len(plain.shape(name)) == 2} - quantised
    assert {name.removeprefix("model.").split(".")[-2] for name in kept} == {"embed_tokens", "lm_head", "gate"}
    values, before = fp8_values(found, DENSE), plain.tensor(f"{DENSE}.weight").astype(np.float32)
    assert np.abs(values - before).max() <= np.abs(before).max() / 28  # four bits of the largest value


def test_int8_has_the_channel_wise_names_of_compressed_tensors(folders):
    found, plain = Checkpoint.open(folders["int8"]), Checkpoint.open(PLAIN)
    codes, scales = found.tensor(f"{DENSE}.weight"), found.tensor(f"{DENSE}.weight_scale")
    before = plain.tensor(f"{DENSE}.weight").astype(np.float32)
    assert (codes.dtype, scales.dtype, scales.shape) == (np.int8, np.float32, (len(codes), 1))
    assert (np.abs(codes * scales - before) <= 0.51 * scales).all()


@pytest.mark.parametrize("to", FORMATS)
def test_a_matrix_of_many_rows_is_quantised_as_at_once(tmp_path: Path, to):
    plain = Checkpoint.open(PLAIN)
    tensors = {name: plain.tensor(name) for name in plain.names}
    name, rows = f"{EXPERT}.weight", ROWS_AT_A_TIME + 200
    tensors[name] = np.random.default_rng(0).standard_normal((rows, 160), np.float32)
    write_checkpoint(tmp_path / "before", plain.config, tensors)
    convert(tmp_path / "before", to, tmp_path / "out")
    values, scales = FORMATS_BY_NAME[to].quantise(tensors[name])
    found = Reader(Checkpoint.open(tmp_path / "out"))
    np.testing.assert_array_equal(found.coded(name, (rows, 160), FORMATS_BY_NAME[to])[0], values)
    np.testing.assert_array_equal(found.coded(name, (rows, 160), FORMATS_BY_NAME[to])[1], scales)


@pytest.mark.parametrize("to", FORMATS)
def test_a_folder_that_is_in_the_format_already_is_copied_bit_for_bit(folders, tmp_path: Path, to):
    done = convert(folders[to], to, tmp_path / "again", max_shard_bytes=1 << 20)
    assert done.num_quantised == done.num_widened == 0
    assert contents(tmp_path / "again") == contents(folders[to])
    assert Checkpoint.open(tmp_path / "again").config == Checkpoint.open(folders[to]).config


def test_a_plain_folder_to_bf16_is_a_copy(tmp_path: Path):
    convert(PLAIN, "bf16", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(PLAIN)
    for file in KEPT:
        assert (tmp_path / "out" / file).read_bytes() == (PLAIN / file).read_bytes()


def test_int4_becomes_bf16_value_for_value(folders, tmp_path: Path):
    done = convert(folders["int4"], "bf16", tmp_path / "out")
    stored, found, plain = (Checkpoint.open(folder) for folder in (folders["int4"], tmp_path / "out", PLAIN))
    assert done.rounded == []
    assert found.names == plain.names
    experts = [name.removesuffix(".weight") for name in plain.names if ".experts." in name]
    assert len(experts) == done.num_widened
    for name in experts:
        np.testing.assert_array_equal(found.tensor(f"{name}.weight"), int4_values(stored, name))
    assert "quantization_config" not in found.config


def test_fp8_becomes_the_nearest_bf16_and_what_was_rounded_is_told(folders, tmp_path: Path):
    done = convert(folders["fp8"], "bf16", tmp_path / "out")
    found = Checkpoint.open(tmp_path / "out")
    values = fp8_values(Checkpoint.open(folders["fp8"]), DENSE)
    np.testing.assert_array_equal(found.tensor(f"{DENSE}.weight"), values.astype(ml_dtypes.bfloat16))
    assert f"{DENSE}.weight" in done.rounded
    assert contents(tmp_path / "out").keys() == contents(PLAIN).keys()


@pytest.mark.parametrize("to", FORMATS)
def test_a_written_folder_is_the_same_model_and_computes_what_its_values_say(folders, tmp_path: Path, to):
    check_formats(Checkpoint.open(folders[to]))
    assert open_model(folders[to])[1] == open_model(PLAIN)[1]
    plain = Checkpoint.open(PLAIN)
    found = Checkpoint.open(folders[to])
    values = {}
    for name in plain.names:
        module = name.removesuffix(".weight")
        if found.has(f"{module}.weight_packed"):
            values[name] = int4_values(found, module)
        elif found.has(f"{module}.weight_scale_inv"):
            values[name] = fp8_values(found, module)
        elif found.has(f"{module}.weight_scale"):
            values[name] = found.tensor(name) * found.tensor(f"{module}.weight_scale")
        else:
            values[name] = found.tensor(name)
    write_checkpoint(tmp_path, plain.config, values)
    tokens = np.load(PLAIN / "ref.npz")["ids0"].tolist()
    computed, expected = (Scorer(folder).observe(tokens).logits for folder in (folders[to], tmp_path))
    np.testing.assert_allclose(computed, expected, atol=LOGIT_TOLERANCE)


def with_shapes(before: Checkpoint, changed: dict[str, np.ndarray], dtype: type[np.integer], folder: Path) -> Path:
    """An INT4 folder again, with some of its `weight_shape`s changed and all of them of this type."""

    def piece(name: str) -> Piece:
        array, spelling = before.stored(name), before.dtype(name)
        if name.endswith(".weight_shape"):
            array, spelling = changed.get(name, before.tensor(name)).astype(dtype), f"I{8 * np.dtype(dtype).itemsize}"
        planned = Planned(dtype=spelling, shape=before.shape(name))
        return Piece(tensors={name: planned}, make=lambda: {name: array})

    write_pieces(folder, before.config, [piece(name) for name in before.names])
    return folder


@pytest.mark.parametrize("spelling", [np.int32, np.int64])
def test_the_shape_beside_packed_codes_is_read_as_either_of_its_types_and_no_other_shape_is_believed(
    folders, tmp_path: Path, spelling
):
    before = Checkpoint.open(folders["int4"])
    convert(with_shapes(before, {}, spelling, tmp_path / "before"), "bf16", tmp_path / "out")
    np.testing.assert_array_equal(
        Checkpoint.open(tmp_path / "out").tensor(f"{EXPERT}.weight"), int4_values(before, EXPERT)
    )
    other = with_shapes(before, {f"{EXPERT}.weight_shape": np.array([7, 7])}, spelling, tmp_path / "other")
    with pytest.raises(ModelError, match=re.escape(f"tensor '{EXPERT}.weight_shape' is [7, 7], and the packed codes")):
        convert(other, "bf16", tmp_path / "none")


@pytest.mark.parametrize("to", ["bf16", *FORMATS])
def test_of_a_folder_with_vision_the_tower_is_copied_and_both_configurations_name_the_format(tmp_path: Path, to):
    before = wrapped(PLAIN, tmp_path / "before")
    convert(before, to, tmp_path / "out", max_shard_bytes=1 << 20)
    found = contents(tmp_path / "out")
    for name in VISION:
        assert found[name] == contents(before)[name]
    config = Checkpoint.open(tmp_path / "out").config
    assert config.get("quantization_config") == config["text_config"].get("quantization_config")
    assert ("quantization_config" in config) is (to != "bf16")
    told = config.get("quantization_config", {})
    untouched = told.get("ignore", []) + told.get("modules_to_not_convert", [])
    assert any("vision_tower" in each for each in untouched) is (to != "bf16")
    assert open_model(tmp_path / "out")[1] == open_model(PLAIN)[1]


def test_float32_becomes_bf16_in_matrices_and_not_in_the_router_s_bias(tmp_path: Path):
    plain = Checkpoint.open(PLAIN)
    wide = {name: plain.tensor(name).astype(np.float32) for name in plain.names}
    wide["lm_head.weight"] += np.float32(1e-5)
    write_checkpoint(tmp_path / "wide", {**plain.config, "torch_dtype": "float32"}, wide)
    done = convert(tmp_path / "wide", "bf16", tmp_path / "out")
    found = Checkpoint.open(tmp_path / "out")
    assert {found.dtype(name) for name in found.names if len(found.shape(name)) == 2} == {"BF16"}
    assert found.dtype("model.layers.1.mlp.gate.e_score_correction_bias") == "F32"
    assert found.config["torch_dtype"] == "bfloat16"
    assert done.rounded == ["lm_head.weight"]


def test_layers_that_guess_further_tokens_are_converted_too(tmp_path: Path):
    plain = Checkpoint.open(PLAIN)
    tensors = {name: plain.tensor(name) for name in plain.names}
    guessing = {
        name.replace(".3.", ".4.", 1): tensors[name] for name in plain.names if name.startswith("model.layers.3.")
    }
    write_checkpoint(tmp_path / "before", plain.config, tensors | guessing)
    convert(tmp_path / "before", "fp8", tmp_path / "out")
    assert Checkpoint.open(tmp_path / "out").dtype("model.layers.4.mlp.shared_experts.up_proj.weight") == "F8_E4M3"


@pytest.mark.parametrize("file", ["model.safetensors", "other.safetensors", "config.json"])
def test_a_folder_that_holds_a_model_is_not_written_over(tmp_path: Path, file: str, capsys):
    (tmp_path / file).write_text("{}")
    assert main(["convert", "--model", str(PLAIN), "--to", "int4", "--out", str(tmp_path)]) == 2
    assert f"{tmp_path / file}: the folder already holds a model" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == [file]


def test_a_folder_is_not_written_where_there_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(CheckpointError, match=r"out: the tensors take \d+ bytes, and 1 are free"):
        convert(PLAIN, "int4", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", FORMATS)
def test_a_value_that_no_format_has_is_named_with_its_tensor(tmp_path: Path, to):
    plain = Checkpoint.open(PLAIN)
    tensors = {name: plain.tensor(name) for name in plain.names}
    tensors[f"{EXPERT}.weight"] = np.full_like(tensors[f"{EXPERT}.weight"], np.inf)
    write_checkpoint(tmp_path / "before", plain.config, tensors)
    with pytest.raises(ModelError, match=f"tensor '{EXPERT}.weight' cannot be in {to}"):
        convert(tmp_path / "before", to, tmp_path / "out")
    with pytest.raises(CheckpointError):
        Checkpoint.open(tmp_path / "out")


def test_a_shape_that_does_not_fit_the_packed_codes_is_named(folders, tmp_path: Path):
    found = Checkpoint.open(folders["int4"])
    tensors = {name: found.tensor(name) for name in found.names}
    tensors[f"{EXPERT}.weight_shape"] = np.array([64, 999], np.int32)
    write_checkpoint(tmp_path / "before", found.config, tensors)
    with pytest.raises(ModelError, match=f"tensor '{EXPERT}.weight_shape' is .64, 999., and the packed codes have"):
        convert(tmp_path / "before", "bf16", tmp_path / "out")


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys):
    assert main(["convert", "--model", str(PLAIN), "--to", "int4", "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{tmp_path}/out: {len(Checkpoint.open(tmp_path / 'out').names)} tensors, ")
    assert "144 matrices quantised" in told
    assert Checkpoint.open(tmp_path / "out").config["quantization_config"]["format"] == "pack-quantized"
