"""What each program of a stage does on one device: it unpacks its fields, and reads and writes the device's state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moonshard.kv.block_shards import BlockShards
from moonshard.kv.pages import Pages, gather_blocks, scatter_blocks
from moonshard.models.model import Batch
from moonshard.serving.engine.compiled.stage_model import StageModel
from moonshard.serving.engine.draws import Fields
from moonshard.serving.engine.steps import StepKind, StepLayout


class StepInput(NamedTuple):
    """How a kind of step reads its fields: what it runs over, and for which of the resulting rows tokens are drawn."""

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


INPUTS = {
    StepKind.PREFILL: StepInput(
        _prefill_batch, lambda rows, f: rows[f["sample_from"]], lambda f: f["tokens"].size, True
    ),
    StepKind.DECODE: StepInput(_decode_batch, lambda rows, f: rows, lambda f: 1),
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
) -> tuple[Pages, jax.Array | None, jax.Array]:
    """Runs a stage's layers; returns the pages with their KV. On the last stage also returns the logits of the rows
    that are drawn for, written over the first of `logits`, and a number: all outputs of a program are ready at once. On
    other stages there are no logits, and the activations come instead of the number, as where `read` gives rows.
    """
    f = layout.unpack(packed[0])
    with jax.default_matmul_precision(precision):
        out, pages, _ = part.model.forward(
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
        )
        if logits is None:
            return pages, None, out
        drawn_for = read.drawn_for(out.reshape(-1, out.shape[-1]), f)
        found = part.model.unembed(weights, drawn_for, part.shard, machine=part.machine)
    return pages, jax.lax.dynamic_update_slice(logits, found, (0, 0)), out if read.gives_rows else jnp.int32(0)


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
