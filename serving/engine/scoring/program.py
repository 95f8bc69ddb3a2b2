"""The program that scores prompts, behind a prefill: on one device, whose own rows the arrays are.

A prefill gives the rows that its logits would come from. Here they become logits a tile at a time, and of these no more
stays than each next token's log-probability, its rank and the likeliest others, so that no chunk's logits are ever
whole. Only steps with a prompt to be scored launch it. The mathematics is `models.sampling`'s; what a step says of
which rows, and what becomes of the scores, is `prompts`'.
"""

from typing import Any

import jax
import jax.numpy as jnp

from moonshard.models import sampling
from moonshard.serving.control.request import MAX_LOGPROBS
from moonshard.serving.engine.compiled.stage_model import StageModel
from moonshard.serving.engine.steps import StepLayout
from moonshard.sharding.arrays import Array, Float, Int

SCORED_COLUMNS = 2 + 2 * MAX_LOGPROBS  # of the packed scores, int32


def score(
    part: StageModel, layout: StepLayout, tile: int, precision: str, weights: Any, packed: jax.Array, rows: jax.Array
) -> Int[Array, "t columns"]:
    """The packed scores of one partition's tokens, zeros in tiles that nobody asks for.

    `rows`: what the last stage of the prefill gave, [n, tokens of a row, embed].
    """
    f = layout.unpack(packed[0])
    flat = rows.reshape(-1, rows.shape[-1])

    def score_tile(index: Int[Array, ""], found: Int[Array, "t columns"]) -> Int[Array, "t columns"]:
        start = f["tiles"][index] * tile
        with jax.default_matmul_precision(precision):
            own = jax.lax.dynamic_slice_in_dim(flat, start, tile)
            logits = part.model.unembed(weights, own, part.shard, machine=part.machine)
        targets = jax.lax.dynamic_slice_in_dim(f["targets"], start, tile)
        return jax.lax.dynamic_update_slice_in_dim(found, _packed(logits, targets), start, axis=0)

    nothing = jnp.zeros((len(flat), SCORED_COLUMNS), jnp.int32)
    return jax.lax.fori_loop(0, f["num_tiles"], score_tile, nothing)


def _packed(logits: Float[Array, "b v"], targets: Int[Array, "b"]) -> Int[Array, "b columns"]:
    """Rank, bits of the log-probability, likeliest ids, bits of theirs; a small vocabulary leaves columns of zeros."""

    def bits(x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)

    found = sampling.score_tokens(logits, targets, num_top=MAX_LOGPROBS)
    unused = ((0, 0), (0, MAX_LOGPROBS - found.top_ids.shape[1]))
    top_ids, top_logprobs = jnp.pad(found.top_ids, unused), jnp.pad(bits(found.top_logprobs), unused)
    return jnp.concatenate([found.ranks[:, None], bits(found.logprobs)[:, None], top_ids, top_logprobs], axis=1)
