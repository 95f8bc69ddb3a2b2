"""The windowed model gives the reference's logits, whatever the steps, and wherever its two groups' blocks lie."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moonshard.kv.pages import allocate_pages
from moonshard.models import weights
from moonshard.models.model import Batch, Model
from moonshard.models.registry import open_model
from moonshard.models.score import score
from moonshard.models.spec import page_layers
from moonshard.sharding.mesh import build_mesh, replicated
from moonshard.sharding.shape import MeshShape
from tests.agreement import LOGIT_TOLERANCE
from tests.windowed.folder import CONFIG, WINDOW, a_prompt
from tests.windowed.model import FULL, SLIDING
from tests.windowed.reference import Reference

pytestmark = pytest.mark.xdist_group("jax")
BLOCK_SIZE = 16
NUM_COLUMNS = 12  # of a table
NUM_BLOCKS = 64
TILE = 16  # positions of a row
LENGTH = 150
UNEVEN = (1, 7, 64, 30, 48)  # of the same 150 tokens
type Table = Callable[[int], int]  # the block of a column


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A sequence, and where its blocks lie: a table for each group, full and window."""

    tokens: Sequence[int]
    full: Table
    window: Table


@dataclass(frozen=True)
class Chunk:
    """Positions `start` to `end` of a sequence."""

    of: Placed
    start: int
    end: int


class Device:
    """The model's weights and pages, and a step over some chunks."""

    def __init__(self, folder):
        checkpoint, self.model = open_model(folder)
        mesh = build_mesh(MeshShape())
        self.groups = self.model.kv_groups("float32")
        self._weights = weights.load(self.model.declare(), checkpoint, "float32", mesh)
        self.pages = allocate_pages(
            NUM_BLOCKS,
            page_layers(self.groups, range(self.model.config.num_hidden_layers)),
            BLOCK_SIZE,
            self.groups[0].num_features,
            dtype="float32",
            sharding=replicated(mesh),
        )

    def run(self, *chunks: Chunk) -> list[np.ndarray]:
        """Logits [T, vocab] of each chunk; all of them in one step."""
        rows = [row for chunk in chunks for row in _rows(chunk)]
        size = next(size for size in (1, 4, 16) if size >= len(rows))
        tokens, positions = np.zeros((size, TILE), np.int32), np.full((size, TILE), -1, np.int32)
        tables = np.full((size, 2, NUM_COLUMNS), NUM_BLOCKS, np.int32)  # the null page
        for index, row in enumerate(rows):
            num_tokens = row.end - row.start
            tokens[index, :num_tokens] = row.of.tokens[row.start : row.end]
            positions[index, :num_tokens] = np.arange(row.start, row.end)
            for column in range(-(-row.end // BLOCK_SIZE)):
                tables[index, :, column] = row.of.full(column), row.of.window(column)
        batch = Batch(tokens=jnp.asarray(tokens), positions=jnp.asarray(positions), block_tables=jnp.asarray(tables))
        logits, self.pages = _forward(self.model, self._weights, self.pages, batch)
        found, ends = np.asarray(logits)[positions >= 0], np.cumsum([chunk.end - chunk.start for chunk in chunks])
        return np.split(found, ends[:-1])


@functools.partial(jax.jit, static_argnames="model")
def _forward(model: Model, loaded, pages, batch):
    hidden, pages, _ = model.forward(loaded, pages, batch)
    logits = model.unembed(loaded, hidden.reshape(-1, hidden.shape[-1]))
    return logits.reshape(*hidden.shape[:2], -1), pages


def _rows(chunk: Chunk) -> Iterator[Chunk]:
    for start in range(chunk.start, chunk.end, TILE):
        yield Chunk(chunk.of, start, min(start + TILE, chunk.end))


def _chunks(placed: Placed, sizes: Sequence[int]) -> list[Chunk]:
    ends = np.cumsum([0, *sizes]).tolist()
    assert ends[-1] == len(placed.tokens)
    return [Chunk(placed, start, end) for start, end in pairwise(ends)]


def _sizes(chunk_tokens: int) -> list[int]:
    whole, rest = divmod(LENGTH, chunk_tokens)
    return [chunk_tokens] * whole + [rest] * (rest > 0)


def in_order(tokens: Sequence[int]) -> Placed:
    """Blocks of the window lie behind all blocks of the full group."""
    return Placed(tokens=tokens, full=lambda column: column, window=lambda column: NUM_COLUMNS + column)


def in_ring(tokens: Sequence[int], num_blocks: int) -> Placed:
    """The window's blocks are so many, and each is taken again for a later column."""
    return Placed(tokens=tokens, full=lambda column: column, window=lambda c: NUM_COLUMNS + c % num_blocks)


def ring_blocks(chunk_tokens: int) -> int:
    """Just enough for all that the queries of a chunk see together: a window back from its first, up to its last.

    Even where a chunk begins within a block: what is written into a block leaves the rest of it as it was.
    """
    return -(-(WINDOW - 1 + chunk_tokens) // BLOCK_SIZE)


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=LOGIT_TOLERANCE)


@pytest.fixture
def device(folder) -> Device:
    return Device(folder)


@pytest.fixture(scope="module")
def expected(reference: Reference) -> np.ndarray:
    return reference.logits(a_prompt(LENGTH))


def test_each_layer_is_in_one_group_and_a_block_has_room_for_the_larger(device):
    assert [(group.name, group.layers, group.window) for group in device.groups] == [
        (FULL, (0, 2), None),
        (SLIDING, (1, 3), WINDOW),
    ]
    assert device.pages.shape == (NUM_BLOCKS, 2, BLOCK_SIZE, 2 * CONFIG["num_attention_heads"] * CONFIG["head_dim"])


def test_a_whole_prompt_in_one_step(device, expected):
    (found,) = device.run(Chunk(in_order(a_prompt(LENGTH)), 0, LENGTH))
    assert_close(found, expected)


@pytest.mark.parametrize("sizes", [UNEVEN, _sizes(16), _sizes(37), [1] * LENGTH], ids=["uneven", "16", "37", "1"])
def test_a_prompt_in_chunks(device, expected, sizes):
    found = [device.run(chunk)[0] for chunk in _chunks(in_order(a_prompt(LENGTH)), sizes)]
    assert_close(np.concatenate(found), expected)


def test_sequences_of_one_batch_with_scattered_blocks(device, reference):
    free = iter(np.random.default_rng(1).permutation(NUM_BLOCKS).tolist())
    steps = {150: (64, 64, 22), 33: (16, 16, 1), 90: (1, 40, 49), 41: (20, 20, 1)}  # of each sequence, by its length
    sequences = list[Placed]()
    for length in steps:
        full, window = ([next(free) for _ in range(-(-length // BLOCK_SIZE))] for _ in range(2))
        sequences.append(Placed(tokens=a_prompt(length, seed=length), full=full.__getitem__, window=window.__getitem__))
    chunked = [_chunks(placed, steps[len(placed.tokens)]) for placed in sequences]
    found = [device.run(*together) for together in zip(*chunked, strict=True)]
    for placed, parts in zip(sequences, zip(*found, strict=True), strict=True):
        assert_close(np.concatenate(parts), reference.logits(placed.tokens))


@pytest.mark.parametrize("num_spare", [0, 1])
@pytest.mark.parametrize("chunk_tokens", [1, 16, 37, 64])
def test_blocks_of_the_window_may_be_taken_again_behind_it(device, expected, chunk_tokens, num_spare):
    num_blocks = ring_blocks(chunk_tokens) + num_spare
    assert num_blocks < -(-LENGTH // BLOCK_SIZE), "nothing would be taken again"
    chunks = _chunks(in_ring(a_prompt(LENGTH), num_blocks), _sizes(chunk_tokens))
    assert_close(np.concatenate([device.run(chunk)[0] for chunk in chunks]), expected)


@pytest.mark.parametrize("chunk_tokens", [1, 16, 37, 64])
def test_a_ring_that_is_smaller_than_the_window_is_seen_in_the_logits(device, expected, chunk_tokens):
    chunks = _chunks(in_ring(a_prompt(LENGTH), ring_blocks(chunk_tokens) - 1), _sizes(chunk_tokens))
    found = np.concatenate([device.run(chunk)[0] for chunk in chunks])
    assert np.abs(found - expected).max() > 100 * LOGIT_TOLERANCE


def test_what_blocks_before_the_window_hold_is_not_looked_at(device, expected):
    tokens, poisoned = a_prompt(LENGTH), NUM_BLOCKS - 1
    device.run(Chunk(in_order(tokens), 0, LENGTH - 1))
    device.pages = device.pages.at[poisoned].set(1e4)
    first_seen = (LENGTH - WINDOW) // BLOCK_SIZE  # the column
    in_place = in_order(tokens)

    def last(num_poisoned: int) -> np.ndarray:
        def window(column: int) -> int:
            return poisoned if column < num_poisoned else in_place.window(column)

        return device.run(Chunk(Placed(tokens=tokens, full=in_place.full, window=window), LENGTH - 1, LENGTH))[0]

    assert_close(last(first_seen), expected[-1:])
    assert np.abs(last(first_seen + 1) - expected[-1:]).max() > 100 * LOGIT_TOLERANCE


def test_a_score_over_both_groups_is_the_reference_s(folder, expected):
    assert_close(score(folder, a_prompt(LENGTH), "float32"), expected)


# ---- that the reference is one that tells right from wrong


def test_the_window_begins_to_matter_where_it_is_full(written, expected):
    wider = Reference(written, window=WINDOW + 1).logits(a_prompt(LENGTH))
    np.testing.assert_array_equal(wider[:WINDOW], expected[:WINDOW])
    assert np.abs(wider[WINDOW:] - expected[WINDOW:]).max(axis=1).min() > 10 * LOGIT_TOLERANCE


def test_a_token_far_behind_every_window_is_still_seen(reference, expected):
    first, *rest = a_prompt(LENGTH)
    other = reference.logits([(first + 1) % CONFIG["vocab_size"], *rest])
    assert np.abs(other[-1] - expected[-1]).max() > 10 * LOGIT_TOLERANCE  # 149 tokens back; two windows reach 78


@pytest.mark.parametrize("length", [5, 17, 39, 64, 100, 150, 300, 500])
def test_no_greedy_step_is_a_near_tie(reference, length):
    assert reference.least_margin(a_prompt(length, seed=length), 120) > 1e-3
