"""Stored formats are read once and held as they are; what of them cannot be served is refused by tensor and file."""

from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from moonshard.models import weights
from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.folder.writing import write_checkpoint
from moonshard.models.formats.quantised import Quantised
from moonshard.models.registry import open_model
from moonshard.models.spec import ModelError
from moonshard.sharding.mesh import build_mesh
from moonshard.sharding.rules import DECODE, PREFILL, MeshError
from moonshard.sharding.shape import MeshShape
from tests.quantised import write_folders

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]
EXPERT = "model.layers.1.mlp.experts.3.down_proj."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    found = dict[str, Path]()

    def of(format: str) -> Path:
        if format not in found:
            found[format] = tmp_path_factory.mktemp(format)
            write_folders(found[format], format)
        return found[format] / "stored"

    return of


def changed(folder: Path, out: Path, name: str, tensor: np.ndarray | None) -> Path:
    """The folder with one tensor replaced, or without it."""
    checkpoint = Checkpoint.open(folder)
    tensors = {each: checkpoint.tensor(each) for each in checkpoint.names}
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    write_checkpoint(out, checkpoint.config, tensors)
    return out


def loaded(folder: Path, mesh: MeshShape | None = None, rules=PREFILL):
    checkpoint, model = open_model(folder)
    return weights.load(model.declare(), checkpoint, "float32", build_mesh(mesh or MeshShape()), rules)


def test_codes_and_scales_are_held_as_the_files_have_them(folder):
    checkpoint, experts = Checkpoint.open(folder("int4")), loaded(folder("int4")).experts
    np.testing.assert_array_equal(experts.down.values[0, 3], checkpoint.tensor(f"{EXPERT}weight_packed"))
    np.testing.assert_array_equal(experts.down.scales[0, 3], checkpoint.tensor(f"{EXPERT}weight_scale"))


@pytest.mark.parametrize(("format", "mesh"), [("int4", {"tensor": 2}), ("int4", {"expert": 4}), ("fp8", {"tensor": 2})])
def test_a_device_has_no_more_than_its_own_codes_and_scales(folder, format, mesh):
    experts = loaded(folder(format), MeshShape(**mesh)).experts
    for leaf in jax.tree.leaves(experts):
        (num_parts,) = mesh.values()
        assert leaf.addressable_shards[0].data.size * num_parts == leaf.size


def test_tensors_of_different_formats_in_one_leaf_are_held_as_their_values(folder, tmp_path):
    """Here one expert of all is plain."""
    write_folders(tmp_path, "int4", part=".mlp.experts.3.")
    experts = loaded(tmp_path / "stored").experts
    assert not isinstance(experts.down, Quantised)
    wide = Checkpoint.open(tmp_path / "wide")
    for expert in (2, 3):
        expected = wide.tensor(f"model.layers.1.mlp.experts.{expert}.down_proj.weight")
        np.testing.assert_array_equal(experts.down[0, expert], expected)


def test_a_mesh_that_cuts_a_packed_word_is_refused_by_its_key_and_the_tensor(folder, tmp_path):
    """64 columns in 16 parts of 4; no such mesh has devices here, so the expert is made narrower."""
    checkpoint = Checkpoint.open(folder("int4"))
    config = checkpoint.config | {"moe_intermediate_size": 24}
    narrow = dict[str, np.ndarray]()
    for name in checkpoint.names:
        tensor = checkpoint.tensor(name)
        if ".mlp.experts." in name:
            tensor = tensor[:24] if "down_proj" not in name else tensor[:, : 3 if name.endswith("packed") else 1]
        if ".shared_experts." in name:
            tensor = tensor[:24] if "down_proj" not in name else tensor[:, :24]
        narrow[name] = np.ascontiguousarray(tensor)
    write_checkpoint(tmp_path, config, narrow)
    assert loaded(tmp_path).experts.down.shape[-1] == 24
    with pytest.raises(MeshError) as error:
        loaded(tmp_path, MeshShape(tensor=2))
    told = str(error.value)
    assert told.startswith(
        "mesh.tensor = 2 cuts the model's expert_ffw dimension 24 into parts of 12, which cut through"
    )
    assert told.endswith(f"{tmp_path}/model.safetensors: tensor 'model.layers.1.mlp.experts.0.down_proj.weight_packed'")
    assert loaded(tmp_path, MeshShape(tensor=2), DECODE).experts.down.shape[-1] == 24  # whole experts


BAD = {
    "packed of another shape": ("int4", "weight_packed", np.zeros((128, 7), np.int32), "has shape [128, 7]; int4"),
    "packed of another type": ("int4", "weight_packed", np.zeros((128, 8), np.uint8), "has dtype uint8; int4 asks"),
    "scales of another shape": ("int4", "weight_scale", np.ones((128, 3), ml_dtypes.bfloat16), "has shape [128, 3]"),
    "scales of another type": ("int4", "weight_scale", np.ones((128, 2), np.float32), "has dtype float32; int4 asks"),
    "no scales of int4": ("int4", "weight_scale", None, "its scales"),
    "no scales of fp8": ("fp8", "weight_scale_inv", None, "has dtype F8_E4M3, and "),
    "codes of another type": ("fp8", "weight", np.ones((128, 64), np.float32), "has dtype float32; fp8 asks"),
    "no scales of int8": ("int8", "weight_scale", None, "has dtype I8, and "),
}
BAD_VALUES = {
    "a zero scale": ("int4", "weight_scale", 0.0, "has a scale that is zero"),
    "an infinite scale": ("fp8", "weight_scale_inv", np.inf, "has a scale that is infinite"),
    "a scale that is no number": ("int8", "weight_scale", np.nan, "has a scale that is not a number"),
    "a code that is no number": ("fp8", "weight", np.nan, "has a value that is not a number"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_tensor_that_does_not_fit_its_format_is_refused_before_anything_is_read(folder, tmp_path, case):
    format, suffix, tensor, told = BAD[case]
    out = changed(folder(format), tmp_path, EXPERT + suffix, tensor)
    checkpoint, model = open_model(out)
    with pytest.raises(ModelError) as error:
        weights.check_shapes(model.declare(), checkpoint)
    assert told in str(error.value)
    assert EXPERT in str(error.value)
    assert str(out / "model.safetensors") in str(error.value)


@pytest.mark.parametrize("holding", [None, "float32"])
@pytest.mark.parametrize("case", BAD_VALUES)
def test_a_value_that_cannot_be_served_is_refused_when_it_is_read(folder, tmp_path, case, holding):
    format, suffix, value, told = BAD_VALUES[case]
    tensor = Checkpoint.open(folder(format)).tensor(EXPERT + suffix).copy()
    tensor[-1, -1] = value
    out = changed(folder(format), tmp_path, EXPERT + suffix, tensor)
    checkpoint, model = open_model(out)
    with pytest.raises(ModelError) as error:
        weights.load(model.declare(), checkpoint, "float32", build_mesh(MeshShape()), holding=holding)
    assert str(error.value) == f"{out / 'model.safetensors'}: tensor {EXPERT + suffix!r} {told}"
