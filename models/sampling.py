"""From logits to the next token, on the device: penalties, bias, cuts, noise, log-probabilities.

Everything optional sits behind a `lax.cond` on what any row of a tile asks for, so a greedy tile costs only an argmax.
Tiles run one after another, and only those that have rows: one program serves every number of rows. Noise is keyed by
(seed, choice, absolute position), never by slot or step: a request draws the same token wherever and whenever it runs.
Order: penalties, bias and banned stops; the mask of allowed tokens; temperature; min-p; top-k; top-p (as vLLM).
Sources: the Gumbel-max trick (Gumbel 1954); nucleus sampling (arXiv 1904.09751); min-p (arXiv 2407.01082); repetition
penalty (CTRL, arXiv 1909.05858).
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from moonshard.models.pytree import pytree
from moonshard.sharding.arrays import Array, Bool, Float, Int, UInt

MIN_TEMPERATURE = 1e-5  # colder draws the likeliest token all the same; logits over 1e-38 would be infinite
QUICK_TOP_K = 64  # up to here lax.top_k does; beyond, or for top-p alone, the whole row is sorted


@pytree
class SlotState[Leaf]:
    """What the device remembers of each slot between steps. Donated to every step.

    A row holds only if its request needs it: the load step sets the whole row at once.
    """

    output_counts: Leaf  # [slots, v] int32
    is_prompt: Leaf  # [slots, v] bool
    bias_ids: Leaf  # [slots, biases] int32, v or beyond where unused
    bias_values: Leaf  # [slots, biases] float32
    stop_ids: Leaf  # [slots, stops] int32, likewise


@pytree
class RowSampling:
    """How each row's next token is drawn. Neutral values cost nothing."""

    temperature: Float[Array, "b"]  # 0: greedy
    top_p: Float[Array, "b"]
    top_k: Int[Array, "b"]  # 0: off
    min_p: Float[Array, "b"]
    repetition_penalty: Float[Array, "b"]
    presence_penalty: Float[Array, "b"]
    frequency_penalty: Float[Array, "b"]
    seed: UInt[Array, "b 2"]  # high and low word
    choice: Int[Array, "b"]
    position: Int[Array, "b"]  # absolute, of the token to be drawn
    has_bias: Bool[Array, "b"]
    bans_stops: Bool[Array, "b"]  # fewer than min_tokens so far
    wants_logprobs: Bool[Array, "b"]
    is_masked: Bool[Array, "b"]  # a mask says which tokens it may draw


@pytree
class Draws:
    """One token of each row. Log-probabilities are of the raw logits, zeros unless a row wants them."""

    tokens: Int[Array, "b"]
    logprobs: Float[Array, "b"]
    top_ids: Int[Array, "b top"]
    top_logprobs: Float[Array, "b top"]


@pytree
class TokenScores:
    """How likely tokens are under the raw logits of their rows."""

    logprobs: Float[Array, "b"]
    ranks: Int[Array, "b"]  # 1 + how many of the vocabulary are likelier
    top_ids: Int[Array, "b top"]
    top_logprobs: Float[Array, "b top"]


def empty_slots(num_slots: int, vocab_size: int, max_biases: int, max_stops: int) -> SlotState[np.ndarray]:
    """On the host, since jax would compile a program for each of these."""
    return SlotState(
        output_counts=np.zeros((num_slots, vocab_size), np.int32),
        is_prompt=np.zeros((num_slots, vocab_size), np.bool_),
        bias_ids=np.full((num_slots, max_biases), vocab_size, np.int32),
        bias_values=np.zeros((num_slots, max_biases), np.float32),
        stop_ids=np.full((num_slots, max_stops), vocab_size, np.int32),
    )


def load_slot(
    slots: SlotState[Array],
    slot: Int[Array, ""],
    history: Int[Array, "t"],
    num_prompt: Int[Array, ""],
    num_history: Int[Array, ""],
    bias_ids: Int[Array, "biases"],
    bias_values: Float[Array, "biases"],
    stop_ids: Int[Array, "stops"],
) -> SlotState[Array]:
    """Sets one slot's row from its request: prompt tokens, then tokens generated so far, then padding."""
    vocab_size = slots.output_counts.shape[1]
    index = jnp.arange(history.shape[0])
    prompt = jnp.where(index < num_prompt, history, vocab_size)
    output = jnp.where((index >= num_prompt) & (index < num_history), history, vocab_size)
    return replace(
        slots,
        output_counts=slots.output_counts.at[slot].set(jnp.zeros(vocab_size, jnp.int32).at[output].add(1, mode="drop")),
        is_prompt=slots.is_prompt.at[slot].set(jnp.zeros(vocab_size, jnp.bool_).at[prompt].set(True, mode="drop")),
        bias_ids=slots.bias_ids.at[slot].set(bias_ids),
        bias_values=slots.bias_values.at[slot].set(bias_values),
        stop_ids=slots.stop_ids.at[slot].set(stop_ids),
    )


def draw(
    logits: Float[Array, "some v"],
    rows: RowSampling,
    slots: SlotState[Array],
    slot_of_row: Int[Array, "b"],
    num_rows: Int[Array, ""],
    *,
    num_top: int,
    tile: int,
    allowed: UInt[Array, "masks words"] | None = None,
    begin: Int[Array, ""] | int = 0,
    takes_part: Bool[Array, "b"] | None = None,
) -> tuple[Draws, SlotState[Array]]:
    """Draws one token for each of the first `num_rows` rows and notes it in the row's slot.

    A row whose slot is out of range draws for nobody. What lies beyond `num_rows` is not looked at: it draws zeros.

    Args:
        num_top: of how many of the likeliest tokens to give log-probabilities, where a row wants any.
        tile: rows that are drawn at once, a divisor of b. On CPU one: each row then pays for what it asks for itself.
        allowed: 32-bit words; bit t % 32 of word t // 32 says whether token t may be drawn. Looked at for masked rows
            alone; at least one bit of each. None where no row is masked, and nothing of the program.
        begin: where among those of `logits` and `allowed` the rows' own begin, which are b.
        takes_part: a row that does not draws for nobody, and a tile without any draws nothing. None: all do.
    """
    num_padded, size = len(slot_of_row), min(num_top, logits.shape[1])

    def of_tile(leaves, start):
        return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, tile), leaves)

    def draw_tile(index: Int[Array, ""], drawn: Draws) -> Draws:
        own_logits, own_allowed = of_tile((logits, allowed), begin + index * tile)
        own, own_slots = of_tile((rows, slot_of_row), index * tile)
        found = _draw_tile(own_logits, own, slots, own_slots, own_allowed, num_top)
        return jax.tree.map(
            lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, index * tile, axis=0), drawn, found
        )

    def draw_if_any(index: Int[Array, ""], drawn: Draws) -> Draws:
        return jax.lax.cond(jnp.any(of_tile(takes_part, index * tile)), lambda: draw_tile(index, drawn), lambda: drawn)

    nothing = Draws(
        tokens=jnp.zeros(num_padded, jnp.int32),
        logprobs=jnp.zeros(num_padded),
        top_ids=jnp.zeros((num_padded, size), jnp.int32),
        top_logprobs=jnp.zeros((num_padded, size)),
    )
    each = draw_tile if takes_part is None else draw_if_any
    drawn = jax.lax.fori_loop(0, (num_rows + tile - 1) // tile, each, nothing)
    is_noted = jnp.arange(num_padded) < num_rows
    if takes_part is not None:
        is_noted &= takes_part
    noted = jnp.where(is_noted, slot_of_row, len(slots.output_counts))
    counts = slots.output_counts.at[noted, drawn.tokens].add(1, mode="drop")
    return drawn, replace(slots, output_counts=counts)


def _draw_tile(
    logits: Float[Array, "b v"],
    rows: RowSampling,
    slots: SlotState[Array],
    slot_of_row: Int[Array, "b"],
    allowed: UInt[Array, "b words"] | None,
    num_top: int,
) -> Draws:
    adjusted = _adjust(logits, rows, slots, slot_of_row)
    if allowed is not None:
        adjusted = jax.lax.cond(
            jnp.any(rows.is_masked), lambda x: _mask(x, logits, rows.is_masked, allowed), lambda x: x, adjusted
        )
    tokens = jax.lax.cond(
        jnp.any(rows.temperature > 0), _sample, lambda x, _: _first_of_largest(x), adjusted, rows
    ).astype(jnp.int32)
    return _with_logprobs(logits, tokens, rows, num_top)


def _adjust(
    logits: Float[Array, "b v"], rows: RowSampling, slots: SlotState[Array], slot_of_row: Int[Array, "b"]
) -> Float[Array, "b v"]:
    """Penalties, bias, banned stops: each only if a row asks for it."""
    each = jnp.arange(logits.shape[0])[:, None]

    def penalise(x):
        counts = slots.output_counts.at[slot_of_row].get(mode="clip")
        was_seen = slots.is_prompt.at[slot_of_row].get(mode="clip") | (counts > 0)
        repetition = rows.repetition_penalty[:, None]
        x = jnp.where(was_seen, jnp.where(x > 0, x / repetition, x * repetition), x)
        x -= rows.frequency_penalty[:, None] * counts
        return x - rows.presence_penalty[:, None] * (counts > 0)

    def bias(x):
        ids = slots.bias_ids.at[slot_of_row].get(mode="clip")
        values = jnp.where(rows.has_bias[:, None], slots.bias_values.at[slot_of_row].get(mode="clip"), 0)
        return x.at[each, ids].add(values, mode="drop")

    def ban(x):
        ids = slots.stop_ids.at[slot_of_row].get(mode="clip")
        return x.at[each, jnp.where(rows.bans_stops[:, None], ids, x.shape[1])].set(-jnp.inf, mode="drop")

    penalised = (rows.repetition_penalty != 1) | (rows.presence_penalty != 0) | (rows.frequency_penalty != 0)
    logits = jax.lax.cond(jnp.any(penalised), penalise, lambda x: x, logits)
    logits = jax.lax.cond(jnp.any(rows.has_bias), bias, lambda x: x, logits)
    return jax.lax.cond(jnp.any(rows.bans_stops), ban, lambda x: x, logits)


def _mask(
    adjusted: Float[Array, "b v"],
    logits: Float[Array, "b v"],
    is_masked: Bool[Array, "b"],
    allowed: UInt[Array, "b words"],
) -> Float[Array, "b v"]:
    """Leaves what the mask allows. Where bans and bias leave nothing of that, they give way: the answer has to end."""
    is_allowed = _bits(allowed, logits.shape[1]) | ~is_masked[:, None]
    left = jnp.where(is_allowed, adjusted, -jnp.inf)
    is_nothing = jnp.max(left, axis=-1, keepdims=True) == -jnp.inf
    return jnp.where(is_nothing, jnp.where(is_allowed, logits, -jnp.inf), left)


def _bits(words: UInt[Array, "b words"], size: int) -> Bool[Array, "b v"]:
    """The first `size` bits of each row, the least significant of a word first.

    Without a gather: of one row of 8,192 tokens, which is what a CPU draws at once, that took 200 to 300 us, and this
    takes 20 to 70. Of 16 rows at once both take 250.
    """
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(len(words), -1)[:, :size] == 1


def _sample(logits: Float[Array, "b v"], rows: RowSampling) -> Int[Array, "b"]:
    """The Gumbel-max draw over the tokens that the cuts leave. Greedy rows get no noise; no cut removes the argmax."""
    is_random = rows.temperature > 0
    scaled = logits / jnp.where(is_random, jnp.maximum(rows.temperature, MIN_TEMPERATURE), 1.0)[:, None]
    noise = jax.vmap(functools.partial(_noise, logits.shape[1]))(rows.seed, rows.choice, rows.position)
    return _first_of_largest(cut(scaled, rows) + noise * is_random[:, None])


def _first_of_largest(x: Float[Array, "b v"]) -> Int[Array, "b"]:
    """As argmax, which XLA on CPU runs one number at a time: 0.7 ms for a row of 160,000, and these two passes 0.07."""
    size = x.shape[-1]
    places = jnp.where(x == x.max(axis=-1, keepdims=True), jnp.arange(size, dtype=jnp.int32), size)
    return jnp.minimum(places.min(axis=-1), size - 1)  # within the row even where nothing is a number


def _noise(size: int, seed: UInt[Array, "2"], choice: Int[Array, ""], position: Int[Array, ""]) -> Float[Array, "v"]:
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(key, choice), position), (size,))


def cut(scaled: Float[Array, "b v"], rows: RowSampling) -> Float[Array, "b v"]:
    """Sets to -inf what min-p, top-k and top-p leave out. Ties at a threshold stay in."""
    peak = scaled.max(axis=-1, keepdims=True)
    scaled = jnp.where(scaled >= peak + jnp.log(rows.min_p)[:, None], scaled, -jnp.inf)
    size = scaled.shape[1]
    wants = (rows.top_k > 0) | (rows.top_p < 1)
    is_quick = (rows.top_k > 0) & (rows.top_k <= QUICK_TOP_K) | ~wants
    branch = jnp.where(jnp.any(wants), jnp.where(jnp.all(is_quick), 1, 2), 0)
    return jax.lax.switch(
        branch,
        (
            lambda x: x,
            lambda x: _keep_above(x, jax.lax.top_k(x, min(QUICK_TOP_K, size))[0], rows),
            lambda x: _keep_above(x, -jnp.sort(-x, axis=-1), rows),
        ),
        scaled,
    )


def _keep_above(scaled: Float[Array, "b v"], descending: Float[Array, "b m"], rows: RowSampling) -> Float[Array, "b v"]:
    """Top-k, then top-p of what is left, as one threshold per row."""
    rank = jnp.arange(descending.shape[1])
    k = jnp.where(rows.top_k > 0, rows.top_k, descending.shape[1])[:, None]
    shares = jax.nn.softmax(jnp.where(rank < k, descending, -jnp.inf), axis=-1)
    before = jnp.cumsum(shares, axis=-1) - shares
    top_p = jnp.where(rows.top_p < 1, rows.top_p, jnp.inf)[:, None]  # a sum rounded up to 1 cuts nothing by itself
    num_kept = jnp.sum((before < top_p) & (rank < k), axis=-1)
    threshold = jnp.take_along_axis(descending, jnp.maximum(num_kept, 1)[:, None] - 1, axis=1)
    wants = (rows.top_k > 0) | (rows.top_p < 1)
    return jnp.where(wants[:, None] & (scaled < threshold), -jnp.inf, scaled)


def _with_logprobs(logits: Float[Array, "b v"], tokens: Int[Array, "b"], rows: RowSampling, num_top: int) -> Draws:
    num_rows, top = logits.shape[0], min(num_top, logits.shape[1])

    def compute(logits):
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        values, ids = jax.lax.top_k(logprobs, top)
        return jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0], ids, values

    def nothing(logits):
        return jnp.zeros(num_rows), jnp.zeros((num_rows, top), jnp.int32), jnp.zeros((num_rows, top))

    chosen, ids, values = jax.lax.cond(jnp.any(rows.wants_logprobs), compute, nothing, logits)
    return Draws(tokens=tokens, logprobs=chosen, top_ids=ids, top_logprobs=values)


def score_tokens(logits: Float[Array, "b v"], tokens: Int[Array, "b"], *, num_top: int) -> TokenScores:
    """Of each row one token's log-probability and rank, and the `num_top` likeliest, at most the vocabulary."""
    size = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    top, ids = jax.lax.top_k(logits, min(num_top, logits.shape[1]))
    return TokenScores(
        logprobs=(chosen - size)[:, 0],
        ranks=1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32),
        top_ids=ids,
        top_logprobs=top - size,
    )
