"""A model held in the formats of its folder says what its values as float32 say, in every parallel form."""

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moonshard.models import weights
from moonshard.models.machines import MACHINES, XLA, Machine
from moonshard.models.model import Batch
from moonshard.models.native import library
from moonshard.models.registry import open_model
from moonshard.serving.engine.loading.model import abstract_stages
from moonshard.sharding.mesh import BY_PARTITION
from moonshard.sharding.rules import DECODE, PREFILL, Rules
from moonshard.sharding.shape import MeshShape
from moonshard.sharding.shard import Shard
from tests.agreement import LOGIT_TOLERANCE, Reference
from tests.quantised import converted_folders, folders, hub_folders

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]
FORMS = [
    *((MeshShape(), PREFILL), (MeshShape(tensor=2), PREFILL), (MeshShape(tensor=4), PREFILL)),
    *((MeshShape(expert=4), PREFILL), (MeshShape(pipe=2), PREFILL), (MeshShape(expert=2, tensor=2), DECODE)),
    (MeshShape(tensor=2), Rules(kv_tokens=("tensor",))),
    *((MeshShape(data=2), PREFILL), (MeshShape(data=2, expert=2), DECODE), (MeshShape(expert=8), PREFILL)),
    *((MeshShape(pipe=2, tensor=2), PREFILL), (MeshShape(pipe=3), PREFILL)),
]
MACHINES_HERE = {"xla": XLA} | ({} if library.chosen() is None else {"kernels": MACHINES["avx2"]})
NUM_TOKENS = 16


@cache
def wide(format: str) -> Reference:
    return Reference(folders(format) / "wide")


def tokens(num_rows: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2000, (num_rows, NUM_TOKENS)).astype(np.int32)


def logits(
    folder: Path, mesh: MeshShape, rules: Rules, machine: Machine, holding: weights.Holding | None = None
) -> Any:
    """[rows, t, v] of as many rows as the mesh has partitions, each with a block of its own."""
    checkpoint, model = open_model(folder)
    shard, num_rows = Shard(mesh=mesh, rules=rules), mesh.num_partitions
    given = Batch(
        tokens=jnp.asarray(tokens(num_rows)),
        positions=jnp.asarray(np.tile(np.arange(NUM_TOKENS, dtype=np.int32), (num_rows, 1))),
        block_tables=jnp.zeros((num_rows, 1, 1), jnp.int32),
    )
    found: Any = None
    for part in abstract_stages(model, shard, "float32", source=checkpoint, holding=holding, machine=machine):
        loaded = weights.load(part.declared(), checkpoint, "float32", part.mesh, shard.rules, holding=holding)
        like = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), part.weights, loaded)
        assert all(jax.tree.leaves(like))
        found = _stage(part, loaded, given, found)
    return np.asarray(found)


def _stage(part: Any, loaded: Any, batch: Batch, hidden: Any) -> Any:
    (group,) = part.model.kv_groups("float32")

    def on_each_device(loaded: Any, batch: Batch, *hidden: Any) -> Any:
        block = NUM_TOKENS // part.shard.num_parts("kv_tokens")
        pages = jnp.zeros((1, len(part.layers), block, group.num_features), jnp.float32)
        with jax.default_matmul_precision("highest"):
            how = {"shard": part.shard, "backend": part.backend, "machine": part.machine}
            out, _, _ = part.model.forward(loaded, pages, batch, hidden=hidden[0] if hidden else None, **how)
            if part.is_last:
                flat = part.model.unembed(loaded, out.reshape(-1, out.shape[-1]), part.shard, machine=part.machine)
                out = flat.reshape(*batch.tokens.shape, -1)
            return out

    given = () if hidden is None else (jax.device_put(hidden, jax.sharding.NamedSharding(part.mesh, BY_PARTITION)),)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, part.weights)
    in_specs = (specs, BY_PARTITION, *(BY_PARTITION for _ in given))
    run = jax.shard_map(on_each_device, mesh=part.mesh, in_specs=in_specs, out_specs=BY_PARTITION, check_vma=False)
    return jax.jit(run)(loaded, batch, *given)


FEW = [(0, "int4", "xla"), (1, "int4", "kernels"), (3, "int4", "xla"), (4, "int4", "kernels")]
FEW += [(0, "fp8", "kernels"), (1, "fp8", "xla"), (5, "fp8", "kernels"), (6, "int8", "kernels"), (2, "int8", "xla")]


@pytest.mark.parametrize(
    ("format", "mesh", "rules", "machine"),
    [
        pytest.param(
            *(format, *form, machine),
            id=f"{format}-{form[0]}-{machine}",
            marks=[] if (number, format, machine) in FEW else pytest.mark.slow,
        )
        for number, form in enumerate(FORMS)
        for format in ("int4", "fp8", "int8")
        for machine in MACHINES_HERE
    ],
)
def test_logits_are_those_of_the_values_as_float32(format, mesh, rules, machine):
    holding = "native" if machine == "kernels" else None
    found = logits(folders(format) / "stored", mesh, rules, MACHINES_HERE[machine], holding)
    for own, row in zip(found, tokens(mesh.num_partitions), strict=True):
        np.testing.assert_allclose(own, wide(format).logits(list(map(int, row))), atol=LOGIT_TOLERANCE)


@pytest.mark.parametrize("number", [1, *(pytest.param(number, marks=pytest.mark.slow) for number in (0, 3, 4))])
def test_a_folder_as_kimi_k2_5_s_on_the_hub_has_the_logits_of_its_values_on_every_mesh(number):
    mesh, rules = FORMS[number]
    found = logits(hub_folders() / "stored", mesh, rules, MACHINES_HERE.get("kernels", XLA), "native")
    for own, row in zip(found, tokens(mesh.num_partitions), strict=True):
        expected = Reference(hub_folders() / "wide").logits(list(map(int, row)))
        np.testing.assert_allclose(own, expected, atol=LOGIT_TOLERANCE)


OF_DEEPSEEK = [(0, "kernels"), (3, "xla")]


@pytest.mark.parametrize(
    ("number", "machine"),
    [
        pytest.param(*one, marks=[] if one in OF_DEEPSEEK else pytest.mark.slow)
        for one in itertools.product((0, 1, 3, 4), MACHINES_HERE)
    ],
)
def test_a_folder_of_deepseek_converted_to_fp8_has_the_logits_of_its_values_on_every_mesh(number, machine):
    mesh, rules = FORMS[number]
    folder = converted_folders("fp8", "dsv3_groups")
    found = logits(folder / "stored", mesh, rules, MACHINES_HERE[machine], "native" if machine == "kernels" else None)
    for own, row in zip(found, tokens(mesh.num_partitions), strict=True):
        expected = Reference(folder / "wide").logits(list(map(int, row)))
        np.testing.assert_allclose(own, expected, atol=LOGIT_TOLERANCE)
