"""What each program of a stage does on one device: it unpacks its fields, and reads and writes the device's state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moonshard.kv.block_shards import BlockShards
from moonshard.kv.pages import Pages, gather_blocks, scatter_blocks
from moonshard.models.draft import features_of
from moonshard.models.model import Batch
from moonshard.serving.engine.compiled.stage_model import StageModel
from moonshard.serving.engine.draws import Fields
from moonshard.serving.engine.steps import StepKind, StepLayout


class StepInput(NamedTuple):
    """How a kind of step reads its fields: what it runs over, and for which of the resulting rows tokens are drawn.

    Those are [positions, rows, features]: as many positions as a row may draw tokens.
    """

    batch: Callable[[jax.Array | None, Fields], Batch]
    drawn_for: Callable[[jax.Array, Fields], jax.Array]
    chunk_tokens: Callable[[Fields], int]  # the most tokens that one sequence may have in the step
    gives_rows: bool = False  # on the last stage too: prompts may be scored by them


def _prefill_batch(last_token: jax.Array | None, f: Fields) -> Batch:
    del last_token
    return Batch(tokens=f["tokens"], positions=f["positions"], block_tables=f["block_tables"])


def _decode_batch(last_token: jax.Array | None, f: Fields) -> Batch:
    slot = f["slot"]  # behind the first stage, which embeds, no token is looked at
    tokens = jnp.zeros_like(slot) if last_token is None else last_token.at[slot].get(mode="clip")
    return Batch(tokens=tokens[:, None], positions=f["positions"][:, None], block_tables=f["block_tables"])


def _verify_batch(last_token: jax.Array | None, f: Fields) -> Batch:
    index = jnp.arange(f["draft"].shape[1] + 1)
    is_there = (index < f["q_len"][:, None]) & (f["positions"][:, None] >= 0)
    first = _decode_batch(last_token, f)
    return Batch(
        tokens=jnp.concatenate([first.tokens, f["draft"]], axis=1),
        positions=jnp.where(is_there, first.positions + index, -1),
        block_tables=first.block_tables,
    )


def _position_by_position(rows: jax.Array, f: Fields) -> jax.Array:
    """Of all rows their first position, then of all their second, and so on."""
    by_row = rows.reshape(len(f["slot"]), -1, rows.shape[-1])
    return by_row.swapaxes(0, 1)


INPUTS = {
    StepKind.PREFILL: StepInput(
        _prefill_batch, lambda rows, f: rows[f["sample_from"]][None], lambda f: f["tokens"].size, True
    ),
    StepKind.DECODE: StepInput(_decode_batch, _position_by_position, lambda f: 1),
    StepKind.VERIFY: StepInput(_verify_batch, _position_by_position, lambda f: f["draft"].shape[1] + 1),
}


def run(
    part: StageModel,
    read: StepInput,
    layout: StepLayout,
    precision: str,
    weights: Any,
    pages: Pages,
    logits: jax.Array | None,
    last_token: jax.Array | None,
    packed: jax.Array,
    *hidden: jax.Array,
) -> tuple[Pages, jax.Array | None, jax.Array, jax.Array | None]:
    """Runs a stage's layers; returns the pages with their KV. On the last stage also returns the logits of the rows
    that are drawn for, written over the first of `logits`, and a number: all outputs of a program are ready at once. On
    other stages there are no logits, and the activations come instead of the number, as where `read` gives rows. Last
    what a draft model reads of it, where there is one.
    """
    f = layout.unpack(packed[0])
    draft = None if part.draft is None else part.draft.model
    with jax.default_matmul_precision(precision):
        out, pages, seen = part.model.forward(
            weights,
            pages,
            read.batch(last_token, f),
            hidden=hidden[0] if hidden else None,
            backend=part.backend,
            shard=part.shard,
            placement=part.placement,
            machine=part.machine,
            chunk_tokens=read.chunk_tokens(f),
            attention=part.attention,
            expanded=part.expanded,
            taps=() if draft is None else draft.taps,
        )
        if logits is None:
            return pages, None, out, None
        drawn_for = read.drawn_for(out.reshape(-1, out.shape[-1]), f)
        found = part.model.unembed(
            weights, drawn_for.reshape(-1, drawn_for.shape[-1]), part.shard, machine=part.machine
        )
    found = found.reshape(*drawn_for.shape[:-1], -1)
    logits = jax.lax.dynamic_update_slice(logits, found, (0, 0, 0))
    features = None if draft is None else features_of(draft, out, seen)
    return pages, logits, out if read.gives_rows else jnp.int32(0), features


def copy(
    layout: StepLayout, copied: Callable[[Pages, jax.Array, jax.Array], Pages], pages: Pages, packed: jax.Array
) -> Pages:
    f = layout.unpack(packed[0])
    return copied(pages, f["source"], f["destination"])


def export(shards: BlockShards, layout: StepLayout, pages: Pages, packed: jax.Array) -> jax.Array:
    return shards.own_part(gather_blocks(pages, layout.unpack(packed[0])["source"]))


def land(
    shards: BlockShards, layout: StepLayout, pages: Pages, packed: jax.Array, payload: jax.Array
) -> tuple[Pages, jax.Array]:
    pages = scatter_blocks(pages, layout.unpack(packed[0])["destination"], shards.whole(payload))
    return pages, jnp.int32(0)  # all outputs of a program are ready at once
