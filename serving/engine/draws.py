"""What programs do with the slots of a stage: draw tokens, keep them for the next step, and load a request's state.

Written for one device, whose own rows and slots the arrays are. The mathematics of drawing is `models.sampling`'s, and
which program runs when is `stage`'s business.
"""

import jax
import jax.numpy as jnp

from moonshard.models import sampling
from moonshard.models.sampling import Draws, RowSampling, SlotState
from moonshard.serving.control.request import MAX_LOGPROBS
from moonshard.serving.control.sampling_parameters import PARAMETERS
from moonshard.serving.engine.steps import StepLayout
from moonshard.sharding.arrays import Array, Int, UInt

Fields = dict[str, jax.Array]
DRAWN_COLUMNS = 2 + 2 * MAX_LOGPROBS  # of the packed draws, int32


def draw(
    layout: StepLayout,
    tile: int,
    slots: SlotState[Array],
    last_token: jax.Array | None,
    logits: jax.Array,
    packed: jax.Array,
    allowed: UInt[Array, "slots words"],
) -> tuple[SlotState[Array], jax.Array | None, jax.Array]:
    """Draws a token for each row from its logits, and keeps it where the slot's next step reads it.

    `allowed` is looked at for rows that are masked.

    Returns the slots, the newest tokens where this stage embeds them, and the packed draws.
    """
    f = layout.unpack(packed[0])
    draws, slots = sampling.draw(
        logits,
        row_sampling(f),
        slots,
        f["sample_slot"],
        f["num_rows"],
        num_top=MAX_LOGPROBS,
        tile=tile,
        allowed=allowed,
    )
    if last_token is not None:
        last_token = _noted(last_token, f, draws.tokens)
    return slots, last_token, _pack(draws)


def note(
    layout: StepLayout, last_token: Int[Array, "slots"], packed: jax.Array, draws: jax.Array
) -> Int[Array, "slots"]:
    """Keeps tokens that another stage drew."""
    return _noted(last_token, layout.unpack(packed[0]), draws[:, 0])


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
        bans_stops=f["bans_stops"] != 0,
        wants_logprobs=f["wants_logprobs"] != 0,
        is_masked=f["is_masked"] != 0,
    )


def _pack(draws: Draws) -> jax.Array:
    """[rows, `DRAWN_COLUMNS`] int32: token, bits of its log-probability, likeliest ids, bits of theirs."""

    def bits(x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)

    columns = (draws.tokens[:, None], bits(draws.logprobs)[:, None], draws.top_ids, bits(draws.top_logprobs))
    return jnp.concatenate(columns, axis=1)
