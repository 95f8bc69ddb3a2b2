"""A model whose weights stay in their stacks gives the logits that it gives when XLA copies them out."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from moonshard.kv.pages import allocate_pages
from moonshard.models import weights
from moonshard.models.experts import moe
from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.folder.writing import write_checkpoint
from moonshard.models.formats.blocks import num_blocks
from moonshard.models.formats.quantised import Quantised
from moonshard.models.machines import MACHINES, XLA
from moonshard.models.model import Batch, Model
from moonshard.models.native import library
from moonshard.models.native.experts import grouped_experts
from moonshard.models.native.stacked_product import stacked_product
from moonshard.models.product import Stacked, product
from moonshard.models.registry import open_model
from moonshard.sharding.mesh import build_mesh, replicated
from moonshard.sharding.shape import MeshShape
from tests.agreement import FIXTURES

pytestmark = [
    pytest.mark.xdist_group("jax"),
    pytest.mark.skipif(library.chosen() is None, reason="there are no kernels here"),
]
EQUATIONS = {  # of the weights that a layer has, with those that kernels take as they lie
    "ntd,gfd->ntgf": True,
    "ntr,hkr->nthk": True,
    "nthv,dhv->ntd": True,
    "nthr,hvr->nthv": True,
    "ntd,rd->ntr": True,
    "nthk,hkr->nthr": True,
    "ntk,rhk->nthr": False,
}
LONG = 64  # tokens of a chunk whose keys are expanded
MAX_ROWS = 128
SIZES = {"n": 3, "t": 2, "d": 20, "g": 2, "f": 12, "h": 4, "k": 6, "r": 9, "v": 5}


@pytest.mark.parametrize(("equation", "is_taken"), EQUATIONS.items())
@pytest.mark.parametrize("rows", [3, MAX_ROWS])
def test_a_product_in_place_is_the_einsum_whatever_it_sums_over(equation, is_taken, rows):
    sizes = SIZES | {"n": rows}
    of_x, of_weight = equation.split("->")[0].split(",")
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=[sizes[name] for name in of_x]), jnp.float32)
    stack = jnp.asarray(rng.normal(size=[3, *(sizes[name] for name in of_weight)]), jnp.float32)
    run = jax.jit(lambda x, stack, layer: product(equation, x, Stacked(stack, layer, MAX_ROWS)))
    expected = np.einsum(equation, np.asarray(x, np.float64), np.asarray(stack[1], np.float64))
    np.testing.assert_allclose(run(x, stack, jnp.int32(1)), expected, rtol=1e-4, atol=1e-4)
    is_called = "moonshard_stacked_product" in run.lower(x, stack, jnp.int32(1)).as_text()
    assert is_called == (is_taken and rows * SIZES["t"] <= MAX_ROWS)


def test_of_a_large_weight_no_copy_is_made_however_many_rows_there_are(monkeypatch: pytest.MonkeyPatch):
    x, stack = jnp.ones((MAX_ROWS, 2, 20), jnp.float32), jnp.ones((3, 2, 12, 20), jnp.float32)

    def is_called() -> bool:
        run = jax.jit(lambda x, stack, layer: product("ntd,gfd->ntgf", x, Stacked(stack, layer, MAX_ROWS)))
        return "moonshard_stacked_product" in run.lower(x, stack, jnp.int32(1)).as_text()

    assert not is_called()
    monkeypatch.setattr("moonshard.models.product.COPIED_VALUES", 2 * 12 * 20 - 1)
    assert is_called()


@pytest.mark.parametrize("chunk_tokens", [None, LONG])
@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_a_model_in_place_gives_the_logits_of_the_reference(dtype, error, chunk_tokens):
    checkpoint, model = open_model(FIXTURES / "kimi_k2")
    loaded = weights.load(model.declare(), checkpoint, dtype, build_mesh(MeshShape()))
    found, _ = _logits(model, loaded, in_place=True, dtype=dtype, chunk_tokens=chunk_tokens)
    expected, margin = _logits(model, loaded, in_place=False, dtype=dtype)
    # Rounding may send a token to another expert where two score nearly the same, and whatever attends to it differs.
    is_clear = margin > error / 3
    assert is_clear.sum() >= len(margin) / 2
    np.testing.assert_allclose(found[is_clear], expected[is_clear], atol=error * np.abs(expected).max())


def _logits(
    model: Model, loaded, *, in_place: bool, dtype: str, chunk_tokens: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Of the real tokens of two rows with padding; and of each the smallest router margin up to it."""
    mesh, (group,) = build_mesh(MeshShape()), model.kv_groups(dtype)
    positions = np.where(np.arange(8) < 6, np.arange(8), -1)[None].repeat(2, axis=0).astype(np.int32)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 8)).astype(np.int32)
    batch = Batch(*map(jnp.asarray, (tokens, positions, np.arange(2, dtype=np.int32).reshape(2, 1, 1))))

    @jax.jit
    def run(loaded, batch):
        pages = allocate_pages(2, len(group.layers), 8, group.num_features, dtype=dtype, sharding=replicated(mesh))
        backend = grouped_experts if in_place else moe.blocks
        machine = MACHINES["avx2"] if in_place else XLA
        how = {"backend": backend, "machine": machine, "chunk_tokens": chunk_tokens}
        hidden, _, seen = model.forward(loaded, pages, batch, observe=True, **how)
        logits = model.unembed(loaded, hidden.reshape(-1, hidden.shape[-1]), machine=machine)
        assert seen is not None
        assert seen.router_margin is not None
        return logits, jax.lax.cummin(seen.router_margin.min(axis=0).reshape(positions.shape), axis=1).ravel()

    is_real = positions.ravel() >= 0
    logits, margin = (np.asarray(each)[is_real] for each in run(loaded, batch))
    return logits, margin


@pytest.mark.parametrize("chunk_tokens", [None, LONG])
@pytest.mark.parametrize("in_place", [True, False])
def test_weights_held_as_they_are_stored_give_the_logits_of_weights_that_were_widened(tmp_path, in_place, chunk_tokens):
    """Nothing but the order of sums differs: a bfloat16 is a float32."""
    checkpoint, model = _rounded(tmp_path)
    mesh = build_mesh(MeshShape())
    native, wide = (
        weights.load(model.declare(), checkpoint, "float32", mesh, holding=holding) for holding in ("native", None)
    )
    matrices = [*jax.tree.leaves(native.experts), native.embed, native.head, native.sparse.attention.k_up]
    assert all(leaf.dtype == jnp.bfloat16 for leaf in matrices)
    assert native.norm.dtype == native.sparse.router.bias.dtype == jnp.float32
    how = {"in_place": in_place, "dtype": "float32", "chunk_tokens": chunk_tokens}
    found, expected = (_logits(model, loaded, **how)[0] for loaded in (native, wide))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def _rounded(folder: Path) -> tuple[Checkpoint, Model]:
    """The fixture with its weights rounded to bfloat16 and stored so."""
    checkpoint = Checkpoint.open(FIXTURES / "kimi_k2")
    tensors = {name: checkpoint.tensor(name).astype(ml_dtypes.bfloat16) for name in checkpoint.names}
    write_checkpoint(folder, checkpoint.config, tensors)
    return open_model(folder)


def test_devices_that_share_a_pool_of_threads_all_end_with_their_own_parts():
    """Each call waits only for work that some thread has begun, however many others have the pool."""
    devices = np.array(jax.devices())
    rng = np.random.default_rng(0)
    x = rng.normal(size=(len(devices) * 4, 1, 256)).astype(np.float32)
    stack = rng.normal(size=(4, len(devices), 640, 256)).astype(np.float32)

    def own(x, stack):
        def step(total, layer):
            return total + stacked_product(x, stack, layer), None

        return jax.lax.scan(step, jnp.zeros((4, 1, 640)), jnp.arange(4, dtype=jnp.int32))[0]

    cut = PartitionSpec("device")
    mesh = Mesh(devices, ("device",))
    over = jax.shard_map(own, mesh=mesh, in_specs=(cut, PartitionSpec(None, "device")), out_specs=cut, check_vma=False)
    run = jax.jit(over)
    results = [run(x, stack) for _ in range(10)]
    rows = x.reshape(len(devices), 4, 256).astype(np.float64)
    expected = np.einsum("gnk,lgok->gno", rows, stack.astype(np.float64)).reshape(-1, 1, 640)
    for result in results:
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("format", ["int4", "fp8", "int8"])
@pytest.mark.parametrize("equation", [each for each, is_taken in EQUATIONS.items() if is_taken])
def test_a_product_in_place_with_a_stored_format_is_that_of_its_values(equation, format):
    """Of dimensions that whole blocks fill, but for the outermost of rows and of columns."""
    sizes = {"n": 3, "t": 2, "d": 72, "g": 2, "f": 128, "h": 3, "k": 64, "r": 40, "v": 16}
    of_x, of_weight = equation.split("->")[0].split(",")
    shape, rng = [sizes[name] for name in of_weight], np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=[sizes[name] for name in of_x]), jnp.float32)
    block = {"int4": (1, 16), "fp8": (64 if of_weight[-2] == "k" else 1, 8), "int8": (1, shape[-1])}[format]
    values, scales = _stored(rng, format, [2, *shape], block)
    stack = Quantised(values, scales, format, block, shape[-1])
    wide = np.asarray(stack.widened(jnp.float32), np.float64)[1]
    run = jax.jit(lambda x, stack, layer: product(equation, x, Stacked(stack, layer, MAX_ROWS)))
    expected = np.einsum(equation, np.asarray(x, np.float64), wide)
    np.testing.assert_allclose(run(x, stack, jnp.int32(1)), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def _stored(rng: np.random.Generator, format: str, shape: list[int], block: tuple[int, int]):
    scales = jnp.asarray(rng.uniform(0.5, 2, num_blocks(shape, block)), jnp.bfloat16 if format == "int4" else "float32")
    if format == "int4":
        return jnp.asarray(rng.integers(-(2**31), 2**31, (*shape[:-1], -(-shape[-1] // 8)), np.int32)), scales
    if format == "int8":
        return jnp.asarray(rng.integers(-127, 128, shape, np.int8)), scales
    return jnp.asarray(rng.normal(size=shape), jnp.float8_e4m3fn), scales
