"""What weights are held in, and as which model a worker then passes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import pytest

from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.formats.quantised import Quantised
from moonshard.models.formats.sizes import held_as_stored
from moonshard.models.machines import XLA, Machine
from moonshard.models.native import library
from moonshard.models.registry import open_model
from moonshard.serving.cli import main
from moonshard.serving.config.keys import Config, DecodeConfig, KvConfig, ModelConfig, PrefillConfig, WorkerRole
from moonshard.serving.engine.capacity.sizes import WeightBytes
from moonshard.serving.engine.loading.model import LoadedModel, load_model
from moonshard.sharding.budget import budget
from moonshard.sharding.rules import DECODE
from moonshard.sharding.shape import MeshShape
from tests.agreement import FIXTURES
from tests.quantised import converted_folders, folders

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]


def stored(format: str) -> Path:
    return folders(format) / "stored"


def loaded(
    folder: Path,
    weights: str = "native",
    machine: Machine | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    **mesh: int,
) -> LoadedModel:
    model = ModelConfig(path=folder, name="tiny", dtype=dtype)
    config = Config(
        model=replace(model, weights=weights),
        kv=KvConfig(block_size=16, num_blocks=8),
        decode=DecodeConfig(max_slots=8, mesh=MeshShape(**mesh)),
    )
    return load_model(config, "both", lambda message: None, prepares="none", machine=machine)


def formats(model: LoadedModel) -> set[str]:
    """Of the matrices of layers, by format, or by type where they are arrays."""
    trees = [(stage.weights.sparse, stage.weights.experts) for stage in model.programs.stages]
    leaves = jax.tree.leaves(trees, is_leaf=lambda leaf: isinstance(leaf, Quantised))
    return {leaf.format if isinstance(leaf, Quantised) else str(leaf.dtype) for leaf in leaves if leaf.ndim > 2}


@pytest.mark.parametrize("machine", [XLA, None], ids=["xla", "own"])
@pytest.mark.parametrize("format", ["int4", "fp8", "int8"])
def test_a_folder_is_held_as_it_is_stored_with_kernels_and_without(format, machine, caplog):
    caplog.set_level("INFO")
    model = loaded(stored(format), machine=machine)
    assert formats(model) >= {format}
    assert model.fingerprint == Checkpoint.open(stored(format)).fingerprint
    said = [each.getMessage() for each in caplog.records if each.getMessage().startswith("model.weights: ")]
    assert said[0] == f"model.weights: matrices are held in {format}"
    is_slow = machine is XLA or library.chosen() is None
    assert [f"{format} is widened in every step" in line for line in said[1:]] == [True] * is_slow


@pytest.mark.skipif(library.chosen() is None, reason="there are no kernels here")
@pytest.mark.parametrize(
    ("format", "asked", "is_changed"),
    [
        *(("fp8", "bf16", True), ("fp8", "float32", False), ("fp8", "int8", True)),
        *(("int4", "bf16", False), ("int4", "float32", False), ("int4", "int8", True)),
        *(("int8", "int8", False), ("int8", "bf16", True)),
    ],
)
def test_a_worker_that_holds_other_values_than_its_folder_passes_as_another_model(format, asked, is_changed):
    model = loaded(stored(format), asked)
    assert {"bf16": "bfloat16", "float32": "float32"}.get(asked, asked) in formats(model)
    assert (model.fingerprint != Checkpoint.open(stored(format)).fingerprint) == is_changed


@pytest.mark.skipif(library.chosen() is None, reason="there are no kernels here")
@pytest.mark.parametrize(("format", "is_changed"), [("fp8", True), ("int4", False)])
def test_so_does_one_that_computes_in_bfloat16_and_has_rounded_what_kernels_have_exactly(format, is_changed):
    own = Checkpoint.open(stored(format)).fingerprint
    assert loaded(stored(format), dtype="bfloat16").fingerprint == own
    assert (loaded(stored(format), "bf16", dtype="bfloat16").fingerprint != own) == is_changed


def test_int8_holds_what_products_take_and_leaves_tables_and_routers_alone():
    model = loaded(FIXTURES / "kimi_k2", "int8")
    weights = model.programs.stages[0].weights
    assert formats(model) == {"int8", str(weights.sparse.router.gate.dtype)}
    assert not isinstance(weights.embed, Quantised)
    assert not isinstance(weights.head, Quantised)
    assert not isinstance(weights.sparse.router.gate, Quantised)
    tensor = Checkpoint.open(FIXTURES / "kimi_k2").tensor("model.layers.2.mlp.experts.5.down_proj.weight")
    found = jax.tree.map(lambda leaf: leaf[1, 5], weights.experts.down).widened("float32")
    step = np.abs(tensor.astype(np.float32)).max(axis=1, keepdims=True) / 127
    assert (np.abs(found - tensor.astype(np.float32)) <= step * 0.5001).all()


def test_int8_made_at_load_time_is_what_a_converted_folder_has_bit_for_bit():
    made, read = loaded(FIXTURES / "kimi_k2", "int8"), loaded(converted_folders("int8", "kimi_k2") / "stored")
    made, read = (model.programs.stages[0].weights for model in (made, read))
    assert jax.tree.structure(made) == jax.tree.structure(read)
    jax.tree.map(np.testing.assert_array_equal, made, read)


@pytest.mark.skipif(library.chosen() is None, reason="arrays are widened without kernels")
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("mesh", [{}, {"tensor": 2}], ids=str)
def test_what_the_command_tells_of_a_folder_as_on_the_hub_is_what_its_worker_holds(mesh, role: WorkerRole, tmp_path):
    shape, folder, out = MeshShape(**mesh), FIXTURES / "kimi_k25_int4", tmp_path / "budget.json"
    named = ",".join(f"{axis}={size}" for axis, size in (mesh or {"tensor": 1}).items())
    argv = ["budget", "--model", str(folder), "--device", f"1gib:{shape.num_devices}", "--mesh", named]
    assert main([*argv, "--role", role, "--json", str(out)]) == 0
    config = Config(
        model=ModelConfig(path=folder, name="tiny", dtype="bfloat16"),
        kv=KvConfig(block_size=16, num_blocks=8),
        prefill=PrefillConfig(mesh=shape),
        decode=DecodeConfig(mesh=shape),
    )
    model = load_model(config, role, lambda message: None, prepares="none")
    (told,), (stage,) = json.loads(out.read_text())[0]["stages"], model.programs.stages
    assert told["weight_bytes"] == pytest.approx(WeightBytes.of([stage.weights]).on_a_device, rel=0.01)


@pytest.mark.skipif(library.chosen() is None, reason="arrays are widened without kernels")
@pytest.mark.parametrize("mesh", [{}, {"tensor": 2}, {"expert": 4}, {"pipe": 2}], ids=str)
@pytest.mark.parametrize("format", ["int4", "fp8", "int8"])
def test_a_budget_of_a_folder_is_what_a_worker_holds_to_one_in_a_hundred(format, mesh):
    model = loaded(stored(format), **mesh)
    checkpoint, of = open_model(stored(format))
    shape, rules = MeshShape(**mesh), DECODE
    counted = budget(of.pieces(held_as_stored(checkpoint)), shape, rules, 1 << 40, lambda mesh, rules: 0)
    for index, stage in enumerate(model.programs.stages):
        taken = WeightBytes.of([stage.weights])
        assert counted.stages[index].weight_bytes == pytest.approx(taken.on_a_device, rel=0.01)
