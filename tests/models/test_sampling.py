"""Cuts, penalties, noise and log-probabilities against plain numpy, and the drawn tokens against their exact law."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moonshard.models import sampling
from moonshard.models.sampling import RowSampling
from tests.agreement import noise

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]
VOCAB, SLOTS, BIASES, STOPS, NUM_TOP = 97, 5, 3, 2, 20
NULL_SLOT = SLOTS


@functools.partial(jax.jit, static_argnames="tile")
def _draw(logits, rows, slots, slot_of_row, num_rows, tile):
    return sampling.draw(logits, rows, slots, slot_of_row, num_rows, num_top=NUM_TOP, tile=tile)


def DRAW(logits, rows, slots, slot_of_row, *, num_rows=None, tile=None):
    """All rows at once, unless told otherwise."""
    return _draw(logits, rows, slots, slot_of_row, num_rows or len(logits), tile=tile or len(logits))


@functools.partial(jax.jit, static_argnames="tile")
def MASKED(logits, rows, slots, slot_of_row, num_rows, allowed, tile):
    return sampling.draw(logits, rows, slots, slot_of_row, num_rows, num_top=NUM_TOP, tile=tile, allowed=allowed)


CUT, LOAD, ADJUST = jax.jit(sampling.cut), jax.jit(sampling.load_slot), jax.jit(sampling._adjust)


def rows(num_rows: int, **fields) -> RowSampling:
    """Neutral rows, with some fields set: a scalar for all rows, or a value for each."""
    neutral = {"top_p": 1.0, "repetition_penalty": 1.0}
    floats = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    flags = ("has_bias", "bans_stops", "wants_logprobs", "is_masked")
    values = {}
    for name in RowSampling.__dataclass_fields__:
        dtype = np.float32 if name in floats else bool if name in flags else np.int32
        value = fields.pop(name, neutral.get(name, 0))
        shape = (num_rows, 2) if name == "seed" else (num_rows,)
        values[name] = jnp.asarray(np.broadcast_to(np.asarray(value, np.uint32 if name == "seed" else dtype), shape))
    assert not fields
    return RowSampling(**values)


def first_rows(rows: RowSampling, step: int = 1) -> RowSampling:
    """The first four rows, sliced by numpy, since jax compiles for each kind of array."""
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[:4][::step]), rows)


def logits_of(num_rows: int, vocab: int = VOCAB, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(num_rows, vocab)).astype(np.float32) * 3


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def kept(scaled, *, min_p=0.0, top_k=0, top_p=1.0) -> np.ndarray:
    """Which of one row's tokens min-p, then top-k, then top-p of what is left keep."""
    shares = softmax(scaled.astype(np.float64))
    keep = shares >= min_p * shares.max()
    order = np.argsort(-scaled, kind="stable")
    if top_k:
        keep[order[top_k:]] = False
    rest = np.where(keep, shares, 0)[order] / shares[keep].sum()
    if top_p < 1:
        keep[order[np.cumsum(rest) - rest >= top_p]] = False
    return keep


@functools.partial(jax.jit, static_argnums=(0, 1))
def empty(num_slots: int = SLOTS, vocab: int = VOCAB):
    return sampling.empty_slots(num_slots, vocab, BIASES, STOPS)


CUTS = {
    "off": [{}, {}, {}],
    "min-p": [{"min_p": 0.1}, {}, {"min_p": 0.5}],
    "quick top-k": [{"top_k": 1}, {"top_k": 64}, {"top_k": 7}],
    "quick top-k with top-p": [{"top_k": 20, "top_p": 0.6}, {}, {"top_k": 3, "top_p": 0.99, "min_p": 0.2}],
    "top-k of more than the quick way": [{"top_k": 65}, {"top_k": 80, "top_p": 0.9}, {"top_k": 5}],
    "top-k beyond the vocabulary": [{"top_k": 500}, {"top_k": VOCAB}, {}],
    "top-p alone": [{"top_p": 0.9}, {"top_p": 1e-6}, {}],
    "all": [{"top_p": 0.7, "min_p": 0.02}, {"top_k": 70, "min_p": 0.05, "top_p": 0.95}, {"min_p": 0.3}],
}


@pytest.mark.parametrize("asked", CUTS.values(), ids=CUTS.keys())
def test_cuts_keep_what_min_p_top_k_and_top_p_keep_in_that_order(asked):
    for seed in range(5):
        scaled = logits_of(3, seed=seed)
        fields = {
            name: [row.get(name, off) for row in asked] for name, off in (("min_p", 0), ("top_k", 0), ("top_p", 1))
        }
        out = np.asarray(CUT(scaled, rows(3, **fields)))
        expected = np.stack([kept(row, **row_asked) for row, row_asked in zip(scaled, asked, strict=True)])
        np.testing.assert_array_equal(np.isfinite(out), expected)
        np.testing.assert_array_equal(out[expected], scaled[expected])


def test_top_k_alone_keeps_k_tokens_however_peaked_the_row():
    scaled = logits_of(3) - 40
    scaled[:, 5] = 40  # its share rounds to 1
    out = np.asarray(CUT(scaled, rows(3, top_k=[9, 0, 9], top_p=[1, 1, 0.9])))
    assert np.isfinite(out).sum(axis=1).tolist() == [9, VOCAB, 1]


def test_banned_tokens_stay_banned_through_the_cuts():
    scaled = logits_of(3)
    scaled[:, :90] = -np.inf
    out = np.asarray(CUT(scaled, rows(3, top_k=[50, 3, 0], top_p=[1, 0.9, 0.9999])))
    assert (out[:, :90] == -np.inf).all()
    assert np.isfinite(out).any(axis=1).all()


def loaded_slots():
    """Slot 2: prompt 1 1 4, output 4 7 7; a bias on 10 and 11; stop tokens 3 and 90."""
    history = np.asarray([1, 1, 4, 4, 7, 7, 50, 51], np.int32)
    biases, values = np.asarray([10, 11, VOCAB], np.int32), np.asarray([2.5, -100.0, 9.0], np.float32)
    stops = np.asarray([3, 90], np.int32)
    return LOAD(empty(), np.int32(2), history, np.int32(3), np.int32(6), biases, values, stops)


def test_loading_a_slot_sets_its_whole_row_and_no_other():
    slots = loaded_slots()
    counts, prompt = np.zeros((SLOTS, VOCAB), int), np.zeros((SLOTS, VOCAB), bool)
    counts[2, [4, 7]] = 1, 2
    prompt[2, [1, 4]] = True
    np.testing.assert_array_equal(slots.output_counts, counts)
    np.testing.assert_array_equal(slots.is_prompt, prompt)
    assert np.asarray(slots.stop_ids).tolist() == [[VOCAB] * 2] * 2 + [[3, 90]] + [[VOCAB] * 2] * 2
    nobody = np.full(8, 0, np.int32), np.int32(0), np.int32(0), np.full(3, VOCAB, "i4"), np.zeros(3, "f4")
    again = LOAD(slots, np.int32(2), *nobody, np.full(2, VOCAB, np.int32))
    for cleared, fresh in zip(jax.tree.leaves(again), jax.tree.leaves(empty()), strict=True):
        np.testing.assert_array_equal(cleared, fresh)


def penalised(x, repetition, presence, frequency):
    """Slot 2's penalties: Hugging Face's repetition penalty, then OpenAI's two over the output."""
    x = x.astype(np.float64)
    for token in (1, 4, 7):
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token, count in ((4, 1), (7, 2)):
        x[token] -= presence + frequency * count
    return x


@pytest.mark.parametrize("changes", [(1.3, 0.0, 0.0), (1.0, 0.7, 0.0), (1.0, 0.0, 0.4), (0.8, -0.5, 1.5)])
def test_penalties_follow_their_formulas_for_the_rows_that_ask(changes):
    logits = logits_of(3)
    logits[:, [1, 4, 7]] = [[2.0, -2.0, 1.5]] * 3
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    neutral = (1.0, 0.0, 0.0)
    asked = rows(3, **{n: [off, on, off] for n, on, off in zip(names, changes, neutral, strict=True)})
    slot_of_row = np.asarray([2, 2, NULL_SLOT])
    adjusted = np.asarray(ADJUST(logits, asked, loaded_slots(), slot_of_row))
    np.testing.assert_allclose(adjusted[1], penalised(logits[1], *changes), atol=1e-5)
    np.testing.assert_array_equal(adjusted[[0, 2]], logits[[0, 2]])


def test_bias_and_banned_stops_reach_only_rows_that_ask():
    logits = logits_of(3)
    asked = rows(3, has_bias=[True, False, False], bans_stops=[False, True, False])
    adjusted = np.asarray(ADJUST(logits, asked, loaded_slots(), np.asarray([2, 2, 2])))
    expected = logits.copy()
    expected[0, [10, 11]] += [2.5, -100]
    expected[1, [3, 90]] = -np.inf
    np.testing.assert_allclose(adjusted, expected, atol=1e-5)


def test_greedy_rows_take_the_best_token_whatever_the_others_want():
    logits = logits_of(4)
    asked = rows(4, temperature=[0, 1.5, 0, 1.0], top_k=[0, 5, 3, 80], top_p=[1, 0.9, 0.5, 1], seed=[9, 9])
    sampled, _ = DRAW(logits, asked, empty(), np.asarray([0, 1, 3, NULL_SLOT]))
    assert np.asarray(sampled.tokens)[[0, 2]].tolist() == logits.argmax(axis=1)[[0, 2]].tolist()


def test_a_drawn_token_is_noted_in_its_slot_and_a_row_out_of_range_changes_no_state():
    logits, before = logits_of(4), loaded_slots()
    sampled, after = DRAW(logits, rows(4), before, np.asarray([NULL_SLOT, 2, 0, NULL_SLOT]))
    tokens = np.asarray(sampled.tokens)
    counts = np.asarray(before.output_counts).copy()
    counts[2, tokens[1]] += 1
    counts[0, tokens[2]] += 1
    np.testing.assert_array_equal(after.output_counts, counts)
    np.testing.assert_array_equal(after.is_prompt, before.is_prompt)


@pytest.mark.parametrize("tile", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_rows_draw_the_same_in_tiles_of_any_size_and_none_beyond_their_number_is_looked_at(tile):
    logits, before = logits_of(8), loaded_slots()
    asked = rows(
        8, temperature=[0, 1, 0, 0.7, 1, 1, 1, 1], top_p=0.8, top_k=[0, 5, 0, 80, 0, 0, 0, 0], seed=[3, 4],
        position=np.arange(8), repetition_penalty=1.3, wants_logprobs=[False, True, False, False] * 2,
    )  # fmt: skip
    slot_of_row = np.asarray([2, 0, 1, 3, 2, 2, 2, 2])  # of those beyond, left by earlier steps
    together, after = DRAW(logits[:4], first_rows(asked), before, slot_of_row[:4])
    spoiled = np.concatenate([logits[:4], np.full((4, VOCAB), np.nan, np.float32)])
    drawn, then = DRAW(spoiled, asked, before, slot_of_row, num_rows=4, tile=tile)
    assert np.asarray(drawn.tokens)[:4].tolist() == np.asarray(together.tokens).tolist()
    np.testing.assert_allclose(drawn.logprobs[1], together.logprobs[1], atol=1e-6)
    np.testing.assert_array_equal(drawn.top_ids[1], together.top_ids[1])
    np.testing.assert_array_equal(then.output_counts, after.output_counts)
    assert not np.asarray(drawn.tokens)[4:].any()


def masks_of(allowed: np.ndarray) -> np.ndarray:
    """[rows, v] bool as words of 32 bits."""
    padded = np.zeros((len(allowed), -(-VOCAB // 32) * 32), bool)
    padded[:, :VOCAB] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view("<u4")


@pytest.mark.parametrize("tile", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_row_draws_only_what_its_mask_allows_and_the_others_as_without_one(tile):
    logits, slots, slot_of_row = logits_of(4), loaded_slots(), np.asarray([NULL_SLOT] * 4)
    asked = rows(4, temperature=[0, 1, 0, 1], seed=[3, 4], position=np.arange(4), wants_logprobs=True)
    free, _ = DRAW(logits, asked, slots, slot_of_row)
    drawn = np.asarray(free.tokens)
    allowed = np.ones((4, VOCAB), bool)
    allowed[[0, 1], drawn[:2]] = False  # what these two would draw, the last word's tokens among the others
    asked = replace(asked, is_masked=jnp.asarray([True, True, True, False]))
    given = allowed & [[True], [True], [True], [False]]  # nobody looks at the bits of a row that is not masked
    masked, _ = MASKED(logits, asked, slots, slot_of_row, 4, masks_of(given), tile)
    tokens = np.asarray(masked.tokens)
    assert allowed[np.arange(4), tokens].all()
    assert (tokens == drawn).tolist() == [False, False, True, True]
    assert tokens[0] == np.where(allowed[0], logits[0], -np.inf).argmax()
    np.testing.assert_allclose(masked.top_logprobs, free.top_logprobs, atol=1e-6)  # of the raw distribution


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_a_ban_leaves_nothing_of_a_mask_the_mask_holds(temperature):
    """As at the end of a grammar that a stop alone may follow, while stops are banned."""
    asked = rows(4, temperature=temperature, seed=[3, 4], is_masked=True, bans_stops=True)
    allowed = np.zeros((4, VOCAB), bool)
    allowed[:, [3, 90]] = True  # the stops of slot 2
    allowed[1:, 12] = True
    masked, _ = MASKED(logits_of(4), asked, loaded_slots(), np.full(4, 2), 4, masks_of(allowed), 1)
    assert int(masked.tokens[0]) in (3, 90)
    assert np.asarray(masked.tokens)[1:].tolist() == [12] * 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_one_token_allowed_that_one_is_drawn_wherever_it_lies(temperature):
    tokens = np.asarray([0, 31, 32, VOCAB - 1])
    asked = rows(4, temperature=temperature, seed=[3, 4], is_masked=True)
    masked, _ = MASKED(
        logits_of(4),
        asked,
        loaded_slots(),
        np.asarray([NULL_SLOT] * 4),
        4,
        masks_of(np.arange(VOCAB) == tokens[:, None]),
        1,
    )
    assert np.asarray(masked.tokens).tolist() == tokens.tolist()


LAW_DRAWS, LAW_VOCAB = 20_000, 16
LAWS = {
    "plain": {},
    "hot, top-k": {"temperature": 1.6, "top_k": 6},
    "cool, top-p": {"temperature": 0.8, "top_p": 0.8},
    "min-p and top-p": {"temperature": 1.2, "min_p": 0.05, "top_p": 0.95},
}


@pytest.mark.parametrize("fields", LAWS.values(), ids=LAWS.keys())
def test_drawn_tokens_follow_the_exact_distribution(fields):
    logits = logits_of(1, LAW_VOCAB, seed=4)[0] / 2
    temperature = fields.get("temperature", 1.0)
    scaled = logits / np.float32(temperature)
    keep = kept(scaled, **{name: value for name, value in fields.items() if name != "temperature"})
    law = np.where(keep, softmax(scaled.astype(np.float64)), 0)
    law /= law.sum()
    asked = rows(LAW_DRAWS, **{"temperature": 1.0, **fields}, seed=[1, 2], position=np.arange(LAW_DRAWS))
    nobody = np.full(LAW_DRAWS, 1)
    sampled, _ = DRAW(np.tile(logits, (LAW_DRAWS, 1)), asked, empty(1, LAW_VOCAB), nobody)
    counts = np.bincount(np.asarray(sampled.tokens), minlength=LAW_VOCAB)
    assert counts[~keep].sum() == 0
    wanted = law[keep] * LAW_DRAWS
    chi_square, freedom = ((counts[keep] - wanted) ** 2 / wanted).sum(), keep.sum() - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_a_token_depends_on_seed_choice_and_position_alone_and_on_each():
    logits = np.tile(logits_of(1), (7, 1)) / 10
    keys = [((5, 6), 0, 30), ((5, 6), 1, 30), ((5, 6), 0, 31), ((5, 7), 0, 30), ((6, 6), 0, 30)]
    fields = [np.asarray(column) for column in zip(*(keys + keys[:2]), strict=True)]
    seven = rows(7, temperature=1.0, **dict(zip(("seed", "choice", "position"), fields, strict=True)))
    tokens = np.asarray(DRAW(logits, seven, empty(), np.full(7, NULL_SLOT))[0].tokens)
    assert len(set(tokens[:5].tolist())) == 5
    assert tokens[5:].tolist() == tokens[:2].tolist()
    backwards = first_rows(seven, -1)
    fewer = np.asarray(DRAW(logits[:4], backwards, empty(), np.arange(4))[0].tokens)
    assert fewer[::-1].tolist() == tokens[:4].tolist()
    expected = (logits[0] + noise((5 << 32) + 6, 1, [30], VOCAB)).argmax()
    assert tokens[1] == expected


def test_log_probabilities_are_of_the_raw_logits_and_zeros_unless_wanted():
    logits = logits_of(4)
    asked = rows(4, temperature=0.3, top_k=2, seed=[0, 1], wants_logprobs=[False, True, False, False])
    slots = np.arange(4)
    sampled, _ = DRAW(logits, asked, empty(), slots)
    expected = np.log(softmax(logits.astype(np.float64)))
    chosen = np.take_along_axis(expected, np.asarray(sampled.tokens)[:, None], axis=1)[:, 0]
    np.testing.assert_allclose(sampled.logprobs, chosen, atol=1e-4)
    order = np.argsort(-expected, axis=1)[:, :NUM_TOP]
    np.testing.assert_array_equal(sampled.top_ids, order)
    np.testing.assert_allclose(sampled.top_logprobs, np.take_along_axis(expected, order, axis=1), atol=1e-4)
    silent, _ = DRAW(logits, replace(asked, wants_logprobs=jnp.asarray(np.zeros(4, bool))), empty(), slots)
    assert not np.asarray(silent.logprobs).any()
    assert not np.asarray(silent.top_logprobs).any()


@pytest.mark.parametrize("cuts", [{}, {"top_p": 0.9}, {"top_k": 5}, {"top_k": 80}], ids=str)
def test_a_temperature_next_to_nothing_takes_the_likeliest_token(cuts):
    temperatures = [1e-6, 1e-30, 1.2e-38, 1e-45]  # logits over 1.2e-38 are infinite
    logits = logits_of(len(temperatures))
    sampled, _ = DRAW(logits, rows(len(temperatures), temperature=temperatures, **cuts), empty(), np.arange(4))
    np.testing.assert_array_equal(sampled.tokens, logits.argmax(axis=1))


def test_of_equal_logits_the_first_is_drawn_and_a_row_without_numbers_draws_a_token_of_the_vocabulary():
    logits = np.random.default_rng(0).integers(0, 3, (4, VOCAB)).astype(np.float32)
    logits[2], logits[3] = -np.inf, np.nan
    sampled, _ = DRAW(logits, rows(4), empty(), np.arange(4))
    tokens = np.asarray(sampled.tokens)
    np.testing.assert_array_equal(tokens[:3], logits[:3].argmax(axis=1))
    assert 0 <= tokens[3] < VOCAB
