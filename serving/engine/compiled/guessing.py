"""What a draft model does behind a step, on one device: it reads the features that the target left, and guesses on.

Its KV is written from the target's own features at every position whose next token is known by then: over those that a
step computed, and over what guesses wrote there before. Rows and alignment are `models.draft`'s.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from moonshard.kv.pages import Pages
from moonshard.models.draft import chain
from moonshard.models.model import Batch
from moonshard.serving.engine.compiled.stage_model import StageDraft, StageModel
from moonshard.serving.engine.draws import DRAWN_COLUMNS, Fields
from moonshard.serving.engine.steps import StepLayout
from moonshard.sharding.arrays import Array, Bool, Float, Int

type Guessed = tuple[Pages, Int[Array, "slots k"]]


def behind_prefill(
    part: StageModel,
    layouts: tuple[StepLayout, StepLayout],
    num_ahead: int,
    precision: str,
    weights: object,
    pages: Pages,
    last_token: Int[Array, "slots"],
    features: Float[Array, "n t f"],
    packed: jax.Array,
    guessing: jax.Array,
) -> Guessed:
    """Guesses for the first of each sequence that drew a token, in the order of the draws; the rest mean nothing.

    Args:
        layouts: of the prefill, and of the guesses. A token of `following` below 0 is the one that was drawn for slot
            -1 - it.
    """
    f, own = layouts[0].unpack(packed[0]), layouts[1].unpack(guessing[0])
    following = own["following"]
    drawn = last_token.at[-1 - following].get(mode="clip")
    tokens, positions = jnp.where(following < 0, drawn, following), f["positions"]
    batch = Batch(tokens=tokens, positions=positions, block_tables=f["block_tables"])
    sampled = f["sample_from"]
    places = jnp.where(own["num_blocks"] > 0, positions.reshape(-1)[sampled], -1)
    tables = f["block_tables"][sampled // positions.shape[1]]
    with jax.default_matmul_precision(precision):
        hidden, pages = _extend(part, weights, pages, batch, features)
        return _guess(
            part, weights, pages, tables, places, hidden.reshape(-1, hidden.shape[-1])[sampled], own, num_ahead
        )


def behind_decode(
    part: StageModel,
    layouts: tuple[StepLayout, StepLayout],
    num_ahead: int,
    precision: str,
    weights: object,
    pages: Pages,
    draws: Int[Array, "slots columns"],
    features: Float[Array, "n t f"],
    packed: jax.Array,
    guessing: jax.Array,
) -> Guessed:
    """Guesses for each row of a decode step, or of a verification. `draws`: as `draws.draw` or `draws.accept` packs
    them, of the same rows.
    """
    f, own = layouts[0].unpack(packed[0]), layouts[1].unpack(guessing[0])
    tokens, num_emitted = _emitted(draws[: len(features)])
    index = jnp.arange(tokens.shape[1])
    is_there = (index < num_emitted[:, None]) & (f["positions"][:, None] >= 0)
    positions = jnp.where(is_there, f["positions"][:, None] + index, -1)
    batch = Batch(tokens=tokens, positions=positions, block_tables=f["block_tables"])
    last = jnp.maximum(num_emitted - 1, 0)[:, None]
    places = jnp.take_along_axis(positions, last, axis=1)[:, 0]

    def extended(pages: Pages) -> Pages:
        """Nothing reads the hidden states, so what makes them is left out of the program: only the KV is written."""
        return _extend(part, weights, pages, batch, features)[1]

    def guessed(carry: Guessed) -> Guessed:
        hidden, pages = _extend(part, weights, carry[0], batch, features)
        newest = jnp.take_along_axis(hidden, last[..., None], axis=1)[:, 0]
        return _guess(part, weights, pages, f["block_tables"], places, newest, own, num_ahead)

    wants_guesses = own["num_ahead"] > 0
    with jax.default_matmul_precision(precision):
        pages = _if(~wants_guesses, extended, pages)
        pages, guesses = _if(wants_guesses, guessed, (pages, jnp.zeros((len(last), num_ahead), jnp.int32)))
    return pages, jnp.pad(guesses, ((0, len(draws) - len(guesses)), (0, 0)))


def _if[T](is_so: Bool[Array, ""], turn: Callable[[T], T], carry: T) -> T:
    """What `turn` makes of `carry`, or `carry`. It is a loop: `cond` copies the pages, where a loop writes in place."""
    return jax.lax.fori_loop(0, is_so.astype(jnp.int32), lambda _, carry: turn(carry), carry)


def _emitted(draws: Int[Array, "n columns"]) -> tuple[Int[Array, "n t"], Int[Array, "n"]]:
    """The tokens of each position, and how many of them count."""
    if draws.shape[1] == DRAWN_COLUMNS:
        return draws[:, :1], jnp.ones(len(draws), jnp.int32)
    return draws[:, 1:].reshape(len(draws), -1, DRAWN_COLUMNS)[..., 0], draws[:, 0]


def _draft_of(part: StageModel) -> StageDraft:
    assert part.draft is not None  # else there is no such program
    return part.draft


def _extend(
    part: StageModel, weights: object, pages: Pages, batch: Batch, features: Float[Array, "n t f"]
) -> tuple[Float[Array, "n t d"], Pages]:
    how = {"shard": part.shard, "machine": part.machine, "backend": part.backend}
    return _draft_of(part).model.extend(weights, pages, batch, features, **how)


def _guess(
    part: StageModel,
    weights: object,
    pages: Pages,
    tables: Int[Array, "n one m"],
    places: Int[Array, "n"],
    hidden: Float[Array, "n d"],
    own: Fields,
    num_ahead: int,
) -> Guessed:
    block_size = pages.shape[2] * part.shard.num_parts("kv_tokens")
    how = {"shard": part.shard, "machine": part.machine, "backend": part.backend}
    wanted = {"num_wanted": own["num_ahead"], "room": own["num_blocks"] * block_size}
    model = _draft_of(part).model
    guesses, pages = chain(model, weights, pages, tables, places, hidden, num_ahead, **wanted, **how)
    return pages, guesses
