"""What programs do with the slots of a stage: draw tokens, keep them for the next step, and load a request's state.

Written for one device, whose own rows and slots the arrays are. The mathematics of drawing is `models.sampling`'s, and
which program runs when is `stage`'s business.
"""

import jax
import jax.numpy as jnp

from moonshard.models import acceptance, sampling
from moonshard.models.sampling import Draws, RowSampling, SlotState
from moonshard.serving.control.request import MAX_LOGPROBS
from moonshard.serving.control.sampling_parameters import PARAMETERS
from moonshard.serving.engine.steps import StepLayout
from moonshard.sharding.arrays import Array, Int, UInt

Fields = dict[str, jax.Array]
type Drawing = tuple[SlotState[Array], jax.Array | None, jax.Array, jax.Array | None]
DRAWN_COLUMNS = 2 + 2 * MAX_LOGPROBS  # of a token of the packed draws, int32


def draw(
    layout: StepLayout,
    tile: int,
    slots: SlotState[Array],
    last_token: jax.Array | None,
    logits: jax.Array,
    packed: jax.Array,
    allowed: UInt[Array, "slots words"],
) -> Drawing:
    """Draws a token for each row from its logits, and keeps it where the slot's next step reads it.

    `allowed` is looked at for rows that are masked.

    Returns the slots, the newest tokens where this stage embeds them, the packed draws, and where another stage embeds
    them the rows' newest tokens.
    """
    f = layout.unpack(packed[0])
    draws, slots = sampling.draw(
        logits.reshape(-1, logits.shape[-1]),
        row_sampling(f),
        slots,
        f["sample_slot"],
        f["num_rows"],
        num_top=MAX_LOGPROBS,
        tile=tile,
        allowed=allowed,
    )
    return _kept(slots, last_token, f, draws.tokens, _pack(draws))


def accept(
    layout: StepLayout,
    tile: int,
    slots: SlotState[Array],
    last_token: jax.Array | None,
    logits: jax.Array,
    packed: jax.Array,
    allowed: UInt[Array, "slots_positions words"],
) -> Drawing:
    """As `draw`, of each row as many tokens as its draft is right for, and one more.

    The packed draws begin with how many tokens count; those of each position follow, in its order.
    """
    f = layout.unpack(packed[0])
    accepted, slots = acceptance.accept(
        logits.reshape(-1, logits.shape[-1]),
        row_sampling(f),
        slots,
        f["sample_slot"],
        f["num_rows"],
        f["sample_draft"],
        f["sample_q_len"],
        f["stops_from"],
        num_top=MAX_LOGPROBS,
        tile=tile,
        allowed=allowed,
    )
    drawn = jnp.concatenate([accepted.num_emitted[:, None], *map(_pack, accepted.draws)], axis=1)
    return _kept(slots, last_token, f, accepted.newest, drawn)


def _kept(
    slots: SlotState[Array], last_token: jax.Array | None, f: Fields, newest: Int[Array, "slots"], drawn: jax.Array
) -> Drawing:
    if last_token is None:
        return slots, None, drawn, newest
    return slots, _noted(last_token, f, newest), drawn, None


def note(
    layout: StepLayout, last_token: Int[Array, "slots"], packed: jax.Array, newest: Int[Array, "slots"]
) -> Int[Array, "slots"]:
    """Keeps the newest tokens of rows that another stage drew for."""
    return _noted(last_token, layout.unpack(packed[0]), newest)


def _noted(last_token: Int[Array, "slots"], f: Fields, tokens: Int[Array, "slots"]) -> Int[Array, "slots"]:
    """Writes drawn tokens to their slots: the first `num_rows` of them."""
    rows = jnp.arange(len(tokens))
    return last_token.at[jnp.where(rows < f["num_rows"], f["sample_slot"], len(last_token))].set(tokens, mode="drop")


def load(
    layout: StepLayout, slots: SlotState[Array] | None, last_token: jax.Array | None, packed: jax.Array
) -> tuple[SlotState[Array] | None, jax.Array | None]:
    """The newest of a request's tokens is the next decode step's input: one whose KV is here already has no step before
    that to leave it."""
    f = layout.unpack(packed[0])
    if last_token is not None:
        token = f["history"][jnp.maximum(f["num_history"] - 1, 0)]
        last_token = last_token.at[f["slot"]].set(token, mode="drop")
    if slots is not None:
        slots = sampling.load_slot(
            slots,
            f["slot"],
            f["history"],
            f["num_prompt"],
            f["num_history"],
            f["bias_ids"],
            f["bias_values"],
            f["stop_ids"],
        )
    return slots, last_token


def row_sampling(f: Fields) -> RowSampling:
    return RowSampling(
        **{parameter.name: f[parameter.name] for parameter in PARAMETERS},
        choice=f["choice"],
        position=f["sample_position"],
        has_bias=f["has_bias"] != 0,
        bans_stops=f["sample_position"] < f["stops_from"],
        wants_logprobs=f["wants_logprobs"] != 0,
        is_masked=f["is_masked"] != 0,
    )


def _pack(draws: Draws) -> jax.Array:
    """[rows, `DRAWN_COLUMNS`] int32: token, bits of its log-probability, likeliest ids, bits of theirs."""

    def bits(x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)

    columns = (draws.tokens[:, None], bits(draws.logprobs)[:, None], draws.top_ids, bits(draws.top_logprobs))
    return jnp.concatenate(columns, axis=1)
