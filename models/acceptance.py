"""Verification of drafts: tokens that were guessed are kept as far as the model would have drawn them anyway.

A draft counts for nothing in what is drawn. Each position's token is drawn from its own logits with the noise of that
position, as `sampling` draws it without drafts, and a guess is accepted if and only if it is that token. So a request
gets the same tokens with drafts as without, for every seed, temperature, penalty and mask, and not only tokens of the
same law; a guess only decides how many of them one step yields. For greedy rows that is the usual rule.

Rejection sampling (arXiv:2211.17192, section 2.3) accepts with probability sum(min(p, q)) where a draft was drawn from
q. A guess without a distribution of its own is accepted with probability p(guess) by either rule.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moonshard.models import sampling
from moonshard.models.sampling import Draws, RowSampling, SlotState
from moonshard.sharding.arrays import Array, Bool, Float, Int, UInt


class Accepted(NamedTuple):
    """What each row drew. Of its positions the first `num_emitted` count; what the others hold means nothing."""

    draws: tuple[Draws, ...]  # of each position
    num_emitted: Int[Array, "b"]  # at least 1, but 0 beyond the step's rows
    newest: Int[Array, "b"]  # the last token that counts


class _Going(NamedTuple):
    """The rows behind some positions."""

    slots: SlotState[Array]
    goes_on: Bool[Array, "b"]  # all guesses so far were right, and there is a further position
    num_emitted: Int[Array, "b"]
    newest: Int[Array, "b"]


def accept(
    logits: Float[Array, "positions_b v"],
    rows: RowSampling,
    slots: SlotState[Array],
    slot_of_row: Int[Array, "b"],
    num_rows: Int[Array, ""],
    draft: Int[Array, "b guesses"],
    q_len: Int[Array, "b"],
    stops_from: Int[Array, "b"],
    *,
    num_top: int,
    tile: int,
    allowed: UInt[Array, "positions_b words"] | None = None,
) -> tuple[Accepted, SlotState[Array]]:
    """Draws tokens for the first `num_rows` rows, position after position, as long as the guesses are right.

    What a guess would have changed in a row's slot, counts among others, it changes only if it is accepted.

    Args:
        logits: of all rows behind their input tokens, then of all behind their first guesses, and so on: of one
            position more than there are guesses.
        rows: as for `sampling.draw`, at the first position; `bans_stops` is not looked at.
        draft: the tokens that were guessed to follow the input token.
        q_len: how many positions of each row there are; the row has one guess fewer.
        stops_from: the first absolute position at which a row may draw its stop tokens.
        num_top, tile, allowed: as of `sampling.draw`, `allowed` at each position as if the guesses before it were
            right.
    """
    num_padded, first = len(slot_of_row), rows.position

    def at_position(going: _Going, given: tuple[Array, Array]) -> tuple[_Going, tuple[Array, ...]]:
        index, guess = given
        position = first + index
        drawn, slots = sampling.draw(
            logits,
            dataclasses.replace(rows, position=position, bans_stops=position < stops_from),
            going.slots,
            slot_of_row,
            num_rows,
            num_top=num_top,
            tile=tile,
            allowed=allowed,
            begin=index * num_padded,
            takes_part=going.goes_on,
        )
        emitted = _Going(
            slots=slots,
            goes_on=going.goes_on & (drawn.tokens == guess) & (index + 1 < q_len),
            num_emitted=going.num_emitted + going.goes_on,
            newest=jnp.where(going.goes_on, drawn.tokens, going.newest),
        )
        return emitted, (drawn.tokens, drawn.logprobs, drawn.top_ids, drawn.top_logprobs)

    start = _Going(
        slots=slots,
        goes_on=jnp.arange(num_padded) < num_rows,
        num_emitted=jnp.zeros(num_padded, jnp.int32),
        newest=jnp.zeros(num_padded, jnp.int32),
    )
    guesses = jnp.pad(draft, ((0, 0), (0, 1))).T  # none behind the last position, where no row goes on
    end, drawn = jax.lax.scan(at_position, start, (jnp.arange(len(guesses), dtype=jnp.int32), guesses))
    draws = tuple(Draws(*leaves) for leaves in zip(*drawn, strict=True))
    return Accepted(draws=draws, num_emitted=end.num_emitted, newest=end.newest), end.slots
