"""A few layers of a model at full width with random weights, and the steps that serve them.

Full width is what decides a GPU's speed; depth only repeats it. Weights are drawn on the device, the routed experts
one expert at a time, so that the peak is little above what stays. Sequences own disjoint blocks in a shuffled order.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moonshard.kv.pages import Pages, allocate_pages
from moonshard.models import weights
from moonshard.models.experts import moe
from moonshard.models.folder.known import KNOWN
from moonshard.models.model import Batch, ExpandedAttention, LatentModel, Observations, PagedAttention
from moonshard.models.registry import latent_model_of
from moonshard.sharding.mesh import build_mesh, replicated
from moonshard.sharding.shape import MeshShape

DTYPE, ITEM_BYTES = "bfloat16", 2
Step = Callable[[Any, Pages, Batch], tuple[jax.Array, jax.Array, Pages]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceSizes:
    """What is measured: layers, prompt, and decode steps at every batch and context."""

    model: LatentModel
    block_size: int
    q_tile: int  # queries per row of a prefill
    prompt_tokens: int
    batches: tuple[int, ...]
    context_tokens: tuple[int, ...]  # before a decode step

    @property
    def blocks_per_sequence(self) -> int:
        return -(-(max(*self.context_tokens, self.prompt_tokens) + 1) // self.block_size)

    @property
    def num_blocks(self) -> int:
        return max(self.batches) * self.blocks_per_sequence


KIMI_K2 = {
    **KNOWN["kimi-k2"].config,
    "rope_scaling": {
        "type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def kimi_k2_slice(num_moe_layers: int, **changes: int) -> LatentModel:
    """Kimi K2 with one dense layer and a few of its 60 MoE layers; `changes` to its config.json make it smaller."""
    return latent_model_of({**KIMI_K2, "num_hidden_layers": 1 + num_moe_layers, **changes})


def draw_weights(model: LatentModel, seed: int) -> Any:
    declared = model.declare()
    if declared.experts is None:
        raise ValueError("a slice without MoE layers has nothing to measure")
    rest = weights.initialise(replace(declared, experts=None), seed, DTYPE, build_mesh(MeshShape()))
    keys = jax.random.split(jax.random.key(seed + 1))
    # on a mesh from the start, as a stage wants them: to place 34 GB anew could copy them
    draw = jax.jit(_draw_stacked, static_argnums=0, out_shardings=replicated(build_mesh(MeshShape())))
    gate_up, down = (
        draw(param.shape, key)
        for param, key in zip((declared.experts.gate_up, declared.experts.down), keys, strict=True)
    )
    return replace(rest, experts=moe.Experts(gate_up=gate_up, down=down))


def _draw_stacked(shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """[l, e, ...] of fan-in scaled normals, one expert at a time into the final array."""
    num_layers, num_experts, *matrix = shape
    scale = jnp.asarray(shape[-1] ** -0.5, DTYPE)

    def draw(index, drawn):
        values = jax.random.normal(jax.random.fold_in(key, index), matrix, DTYPE) * scale
        place = (index // num_experts, index % num_experts, *(0 for _ in matrix))
        return jax.lax.dynamic_update_slice(drawn, values[None, None], place)

    return jax.lax.fori_loop(0, num_layers * num_experts, draw, jnp.zeros(shape, DTYPE))


def draw_pages(sizes: SliceSizes, seed: int) -> Pages:
    """Pages whose blocks all hold random latents, so that a context need not be prefilled first."""
    shape = (sizes.num_blocks, sizes.model.config.num_hidden_layers, sizes.block_size, sizes.model.config.latent_size)
    empty = allocate_pages(*shape, dtype=DTYPE, sharding=replicated(build_mesh(MeshShape())))
    fill = jax.jit(lambda pages, key: jax.random.normal(key, pages.shape, pages.dtype), donate_argnums=0)
    return fill(empty, jax.random.key(seed))


def decode_batch(sizes: SliceSizes, batch: int, context_tokens: int, seed: int) -> Batch:
    """One new token for each of `batch` sequences that have `context_tokens` behind them."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, sizes.model.config.vocab_size, (batch, 1))
    return _batch(tokens, np.full((batch, 1), context_tokens), _tables(sizes, batch, rng))


def prefill_batch(sizes: SliceSizes, seed: int) -> Batch:
    """One fresh prompt as rows of `q_tile` queries."""
    rng = np.random.default_rng(seed)
    shape = (sizes.prompt_tokens // sizes.q_tile, sizes.q_tile)
    tokens = rng.integers(0, sizes.model.config.vocab_size, shape)
    tables = np.repeat(_tables(sizes, 1, rng), shape[0], axis=0)
    return _batch(tokens, np.arange(sizes.prompt_tokens).reshape(shape), tables)


def _tables(sizes: SliceSizes, batch: int, rng: np.random.Generator) -> np.ndarray:
    count = sizes.blocks_per_sequence
    return rng.permutation(sizes.num_blocks)[: batch * count].reshape(batch, count)


def _batch(tokens: np.ndarray, positions: np.ndarray, tables: np.ndarray) -> Batch:
    return Batch(
        tokens=jnp.asarray(tokens, jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
        block_tables=jnp.asarray(tables[:, None], jnp.int32),  # of the only KV group
    )


def build_step(
    model: LatentModel,
    backend: moe.Backend,
    attention: PagedAttention | None,
    *,
    last_only: bool,
    expanded: ExpandedAttention | None = None,
    chunk_tokens: int | None = None,
) -> Step:
    """A jitted step: the likeliest next tokens, how many distinct experts each MoE layer hit, and the pages (donated).

    Args:
        last_only: logits of the batch's last token only, as a prompt's chunk needs them; else of every row.
        expanded, chunk_tokens: as for `Model.forward`.
    """

    @functools.partial(jax.jit, donate_argnums=1)
    def step(loaded: Any, pages: Pages, batch: Batch):
        how = {"backend": backend, "attention": attention, "expanded": expanded, "chunk_tokens": chunk_tokens}
        hidden, pages, seen = model.forward(loaded, pages, batch, **how, observe=True)
        rows = hidden.reshape(-1, hidden.shape[-1])
        logits = model.unembed(loaded, rows[-1:] if last_only else rows)
        return logits.argmax(axis=-1), _experts_hit(model, seen), pages

    return step


def _experts_hit(model: LatentModel, seen: Observations | None) -> jax.Array:
    if seen is None or seen.experts is None:
        raise ValueError("a slice without MoE layers hits no experts")
    is_hit = jax.nn.one_hot(seen.experts, model.config.n_routed_experts, dtype=jnp.bool_)
    return is_hit.any(axis=(1, 2)).sum(axis=-1)


def smaller(sizes: SliceSizes) -> SliceSizes:
    """The same layers with the fewest steps that still show both phases."""
    return replace(sizes, batches=(1, max(sizes.batches)), context_tokens=sizes.context_tokens[:1])
