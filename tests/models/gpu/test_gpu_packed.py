"""The product with packed weights for Hopper cards has the folder's values and no race, and lowers for a card."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu

from moonshard.models.experts import moe
from moonshard.models.formats.known import FORMATS
from moonshard.models.formats.quantised import Quantised
from moonshard.models.gpu import card
from moonshard.models.gpu.experts import registers
from moonshard.models.gpu.experts.backend import grouped_experts, multiply, why_not
from moonshard.models.gpu.experts.packed_product import packed_product
from moonshard.models.gpu.experts.tiles import Blocks
from tests.models.gpu.hopper import INTERPRETED, distance, lower, races

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]
LAYERS, NUM_EXPERTS, EMBED, WIDTH = 2, 4, 512, 256
TOLERANCE = 1e-2  # of the norm: activations and results are in bfloat16
PROCESSORS = 3  # so that each has several products
BF16 = ml_dtypes.bfloat16


def quantise(matrices: np.ndarray, format: str) -> tuple[Quantised, np.ndarray]:
    """Of [..., out, in]: as it is held, and the values that numpy has for what is stored."""
    *leading, num_own, depth = matrices.shape
    form, found = FORMATS[format], []
    for matrix in matrices.reshape(-1, num_own, depth):
        values, scales = form.quantise(matrix)
        found.append((values, scales, form.dequantise(values, scales, depth).astype(np.float32)))
    values, scales, wide = (np.stack(each).reshape(*leading, *each[0].shape) for each in zip(*found, strict=True))
    return Quantised(jnp.asarray(values), jnp.asarray(scales), format, form.block(depth), depth), wide


@functools.cache
def draw_experts(format: str) -> tuple[Any, Any]:
    """Packed, and as arrays."""
    rng = np.random.default_rng(1)
    gate_up = rng.normal(size=(LAYERS, NUM_EXPERTS, 2, WIDTH, EMBED)) * EMBED**-0.5
    down = rng.normal(size=(LAYERS, NUM_EXPERTS, EMBED, WIDTH)) * WIDTH**-0.5
    (gate_up, wide_gate_up), (down, wide_down) = (quantise(each.astype(np.float32), format) for each in (gate_up, down))
    return moe.Experts(gate_up=gate_up, down=down), moe.Experts(gate_up=wide_gate_up, down=wide_down)


def draw_tokens(count: int, k: int):
    rng = np.random.default_rng(count)
    chosen = np.stack([rng.permutation(NUM_EXPERTS)[:k] for _ in range(count)])
    routing = moe.Routing(
        weights=jnp.asarray(rng.random((count, k)), jnp.float32),
        experts=jnp.asarray(chosen, jnp.int32),
        margin=jnp.asarray(np.full(count, np.inf), jnp.float32),
    )
    return jnp.asarray(rng.normal(size=(count, EMBED)), jnp.bfloat16), routing


@pytest.mark.parametrize(
    ("format", "tokens", "k", "num_rows"),
    [("int4", 5, 2, 16), ("int4", 40, 3, 64), ("int4", 70, 2, 128), ("fp8", 40, 3, 32), ("int8", 5, 2, 16)],
)
def test_packed_experts_have_the_sums_of_the_folders_values_and_no_race(format, tokens, k, num_rows, capfd):
    x, routing = draw_tokens(tokens, k)
    valid = np.arange(tokens) % 7 != 3
    packed, wide = draw_experts(format)
    run = functools.partial(multiply, num_rows=num_rows, num_processors=PROCESSORS, interpret=INTERPRETED)
    got = np.asarray(jax.jit(run)(x, routing, valid, packed, jnp.int32(1)), np.float32)
    with jax.default_matmul_precision("highest"):
        wide = jax.tree.map(jnp.asarray, wide)
        expected = jax.jit(moe.dense)(x.astype(jnp.float32), routing, valid, wide, jnp.int32(1))
    assert distance(got, expected) < TOLERANCE
    assert not got[~valid].any()
    assert races("".join(capfd.readouterr())) == 0


@pytest.mark.parametrize("format", ["int4", "fp8", "int8"])
def test_a_packed_weight_counts_for_exactly_its_own_feature(format):
    """One feature of each row is 1: what comes out is that feature's weights, rounded once to bfloat16."""
    packed, wide = draw_experts(format)
    features = np.arange(16) * 31 % EMBED
    rows = registers.ordered(jnp.asarray(np.eye(EMBED)[features], jnp.bfloat16), format)
    blocks = Blocks(num_rows=16, experts=jnp.asarray([2], jnp.int32), where=jnp.asarray([1, 1], jnp.int32))
    weights = jax.tree.map(lambda leaf: leaf[:, :, :1], packed.gate_up)
    run = functools.partial(packed_product, blocks=blocks, num_processors=PROCESSORS, interpret=INTERPRETED)
    got = jax.jit(run)(rows, weights)
    np.testing.assert_array_equal(np.asarray(got), wide.gate_up[1, 2, 0, :, features].astype(BF16))


@pytest.mark.parametrize("format", registers.PACKINGS)
def test_every_code_is_unpacked_to_its_number_wherever_it_is_in_a_word(format):
    packing, form = registers.PACKINGS[format], FORMATS[format]
    codes = np.arange(1 << 32 // packing.codes, dtype=np.uint32)
    if format == "fp8":
        codes = codes[(codes & 0x7F) != 0x7F]  # no number
    bits = 32 // packing.codes
    for place in range(packing.codes):
        words = (codes << np.uint32(bits * place)).view(np.int32)
        half, which = divmod(place, packing.num_pairs)
        got = packing.pairs(words, which, lambda words: words.view(BF16).reshape(-1, 2))[:, half]
        expected = form.decode(words.view(form.values.dtype).reshape(len(codes), -1))[:, place]
        np.testing.assert_array_equal(got.astype(np.float32), expected)


def held_by_threads(layout, array: np.ndarray) -> np.ndarray:
    """What each thread's registers hold of an array: [warps, lanes, vector], by what a layout says of its tiles."""
    tiled = array
    for tile in layout.tiling.tiles:
        first = tiled.ndim - len(tile)
        parts = [part for size, own in zip(tiled.shape[first:], tile, strict=True) for part in (size // own, own)]
        split = tiled.reshape(*tiled.shape[:first], *parts)
        outer = [first + 2 * each for each in range(len(tile))]
        tiled = split.transpose(*range(first), *outer, *(each + 1 for each in outer))
    return tiled


def by_thread(layout, array: np.ndarray) -> dict:
    """(warp, lane) -> registers of vectors."""
    tiled, found = held_by_threads(layout, array), {}
    lane_sizes = [each.times if isinstance(each, plgpu.Replicated) else tiled.shape[each] for each in layout.lane_dims]
    for warp in range(4):
        for lane in range(32):
            index: list = [slice(None)] * tiled.ndim
            index[layout.warp_dims[0]] = slice(warp, warp + 1)
            for dim, place in zip(layout.lane_dims, np.unravel_index(lane, lane_sizes), strict=True):
                if not isinstance(dim, plgpu.Replicated):
                    index[dim] = slice(int(place), int(place) + 1)
            found[warp, lane] = tiled[tuple(index)]
    return found


@pytest.mark.parametrize("format", registers.PACKINGS)
def test_what_a_thread_unpacks_is_where_a_fragment_has_the_ordered_features(format):
    packing, depth = registers.PACKINGS[format], 64
    rows, features = np.indices((64, depth))
    places = rows * depth + features
    fragment = by_thread(mosaic.WGMMA_LAYOUT, np.asarray(registers.ordered(jnp.asarray(places, jnp.float32), format)))
    items = places if format != "int4" else places[:, :: packing.codes]
    for thread, loaded in by_thread(packing.layout.to_mgpu(), items).items():
        first = loaded[..., :1]  # of a word's codes
        pairs = [
            np.concatenate([first + which, first + which + packing.num_pairs], axis=-1)
            for which in range(packing.num_pairs)
        ]
        np.testing.assert_array_equal(registers.interleaved(pairs), fragment[thread])


@pytest.mark.parametrize("num_groups", [4, 8])
def test_a_threads_scales_are_those_of_its_codes_groups(num_groups):
    depth = num_groups * registers.GROUP
    rows, features = np.indices((64, depth))
    groups = rows * num_groups + features // registers.GROUP
    fragment = by_thread(mosaic.WGMMA_LAYOUT, np.asarray(registers.ordered(jnp.asarray(groups, jnp.float32), "int4")))
    scales = by_thread(registers.scales_layout(num_groups).to_mgpu(), groups[:, :: registers.GROUP])
    for thread, expected in fragment.items():
        for index in np.ndindex(expected.shape[:-1]):
            row, group = registers.scale_of(index)
            assert set(expected[index]) == {scales[thread][row[:-1]][group]}


def shapes(format: str, shape: tuple[int, ...]) -> Quantised:
    form, (*leading, num_own, depth) = FORMATS[format], shape
    values = jax.ShapeDtypeStruct((*leading, *form.stored_shape((num_own, depth))), form.values.dtype)
    scales = jax.ShapeDtypeStruct((*leading, *form.scales_shape((num_own, depth))), form.scales.dtype)
    return Quantised(values, scales, format, form.block(depth), depth)


@pytest.mark.parametrize("format", registers.PACKINGS)
@pytest.mark.parametrize("tokens", [1, 8192])
def test_packed_experts_lower_for_a_card_at_full_size_and_travel_as_they_are_stored(format, tokens):
    d, f, e, k, layers = 7168, 2048, 384, 8, 2
    experts = moe.Experts(gate_up=shapes(format, (layers, e, 2, f, d)), down=shapes(format, (layers, e, d, f)))
    shape = jax.ShapeDtypeStruct

    def run(experts, x, weights, chosen, valid, layer):
        routing = moe.Routing(weights=weights, experts=chosen, margin=jnp.zeros(tokens))
        return grouped_experts(x, routing, valid, experts, layer)

    text = lower(
        run,
        experts,
        shape((tokens, d), jnp.bfloat16),
        shape((tokens, k), jnp.float32),
        shape((tokens, k), jnp.int32),
        shape((tokens,), jnp.bool_),
        shape((), jnp.int32),
    )
    assert text.count("custom_call @mosaic_gpu") == 2
    lines = [line.lstrip() for line in text.splitlines() if "tensor<2x384x" in line]
    touching = [line for line in lines if not line.startswith("func.func")]
    assert touching
    assert all("stablehlo.reshape" in line or "broadcast_in_dim" in line or "call @" in line for line in touching)


@pytest.mark.slow
@pytest.mark.parametrize("format", registers.PACKINGS)
@pytest.mark.parametrize("num_rows", [32, 64])
def test_blocks_of_every_size_lower_within_shared_memory(format, num_rows):
    d, f, tokens = 7168, 2048, 64
    experts = moe.Experts(gate_up=shapes(format, (1, 8, 2, f, d)), down=shapes(format, (1, 8, d, f)))
    shape = jax.ShapeDtypeStruct

    def run(experts, x, weights, chosen, valid, layer):
        routing = moe.Routing(weights=weights, experts=chosen, margin=jnp.zeros(tokens))
        return multiply(x, routing, valid, experts, layer, num_rows=num_rows)

    given = shape((tokens, d), jnp.bfloat16), shape((tokens, 2), jnp.float32), shape((tokens, 2), jnp.int32)
    text = lower(run, experts, *given, shape((tokens,), jnp.bool_), shape((), jnp.int32))
    assert text.count("custom_call @mosaic_gpu") == 2


@pytest.mark.parametrize(
    ("format", "block", "repeats", "reason"),
    [
        ("fp8", (32, 128), (4, 1), "32 x 128"),
        ("fp8", (128, 64), (1, 2), "128 x 64"),
        ("int4", (1, 16), (1, 2), "1 x 16"),
    ],
)
def test_blocks_of_a_cut_that_the_kernel_has_no_scales_for_are_left_to_xla(format, block, repeats, reason, caplog):
    experts, _ = draw_experts(format)
    scales = experts.gate_up.scales.repeat(repeats[0], axis=-2).repeat(repeats[1], axis=-1)
    cut = moe.Experts(gate_up=replace(experts.gate_up, scales=scales, block=block), down=experts.down)
    x, routing = draw_tokens(6, 2)
    assert why_not(x, experts) is None
    card.say_once.cache_clear()
    given = x, routing, jnp.ones(6, bool)
    got = grouped_experts(*given, cut, jnp.int32(0))
    assert reason in caplog.text
    assert distance(got, moe.blocks(*given, experts, jnp.int32(0))) < 1e-6
