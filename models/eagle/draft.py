"""An EAGLE-3 draft as a `models.draft.Draft`: its rows over pages. `folder` makes it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from moonshard.kv.pages import Pages
from moonshard.models.eagle import forward, weights
from moonshard.models.eagle.attention import PagedHeads, grouped_attention
from moonshard.models.eagle.config import EagleConfig, LlamaShape
from moonshard.models.eagle.weights import EagleWeights, LlamaAttention, Stored, in_place
from moonshard.models.experts import moe
from moonshard.models.kimi.forward import absorbed, attend_paged, cos_and_sin, expanded_in_xla, self_attention
from moonshard.models.machines import XLA, Machine
from moonshard.models.model import Batch
from moonshard.models.spec import KvGroup, ModelError, Param
from moonshard.sharding.arrays import Array, Float, Int
from moonshard.sharding.shard import ALONE, Shard

OverPages = Callable[[Float[Array, "n t d2"]], tuple[Float[Array, "n t d"], Pages]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle:
    """See `models.draft.Draft` for what its methods promise."""

    config: EagleConfig
    stored: Stored
    page_layer: int = 0

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    @property
    def feature_size(self) -> int:
        return len(self.config.taps) * self.config.target_hidden_size

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def draft_vocab_size(self) -> int:
        return self.config.draft_vocab_size

    @property
    def cuts_tokens(self) -> bool:
        return not isinstance(self.config.attention, LlamaShape)

    def declare(self) -> EagleWeights[Param]:
        return weights.declare(self.config, self.stored)

    def kv_groups(self, dtype: str) -> tuple[KvGroup, ...]:
        shape = self.config.attention
        num_features = shape.num_features if isinstance(shape, LlamaShape) else shape.latent_size
        return (KvGroup(name="draft", layers=(0,), num_features=num_features, dtype=dtype),)

    def num_page_layers(self, num_features: int) -> int:
        shape = self.config.attention
        if isinstance(shape, LlamaShape):
            return _heads(shape, num_features, self.page_layer).num_layers
        if shape.latent_size != num_features:
            raise ModelError(f"a draft whose latents have {shape.latent_size} values, and the target's {num_features}")
        return 1

    def in_layers_of(self, page_layer: int) -> "Eagle":
        return replace(self, page_layer=page_layer)

    def extend(
        self,
        weights: EagleWeights[Array],
        pages: Pages,
        batch: Batch,
        features: Float[Array, "n t f"],
        *,
        shard: Shard = ALONE,
        machine: Machine = XLA,
        backend: moe.Backend = moe.blocks,
    ) -> tuple[Float[Array, "n t d"], Pages]:
        fused = forward.fused(self.config, _placed(weights, machine), features)
        return self.step(weights, pages, batch, fused, shard=shard, machine=machine, backend=backend)

    def step(
        self,
        weights: EagleWeights[Array],
        pages: Pages,
        batch: Batch,
        hidden: Float[Array, "n t d"],
        *,
        shard: Shard = ALONE,
        machine: Machine = XLA,
        backend: moe.Backend = moe.blocks,
    ) -> tuple[Float[Array, "n t d"], Pages]:
        """A step is an extension whose hidden states are no target's: `backend` is not asked, there are no experts."""
        del backend
        weights = _placed(weights, machine)
        over_pages = self._over_pages(weights, pages, batch, shard, machine)
        written: list[Pages] = []

        def attended(both: Float[Array, "n t d2"]) -> Float[Array, "n t d"]:
            added, pages = over_pages(both)
            written.append(pages)
            return added

        found = forward.layer(self.config, weights, batch.tokens, hidden, attended, shard)
        return found, written[0]

    def logits(
        self,
        weights: EagleWeights[Array],
        hidden: Float[Array, "b d"],
        shard: Shard = ALONE,
        *,
        machine: Machine = XLA,
    ) -> Float[Array, "b v"]:
        return forward.logits(self.config, _placed(weights, machine), hidden, shard)

    def token_of(self, weights: EagleWeights[Array], guessed: Int[Array, "*b"]) -> Int[Array, "*b"]:
        return guessed if weights.d2t is None else guessed + weights.d2t[guessed]

    def _over_pages(
        self, w: EagleWeights[Array], pages: Pages, batch: Batch, shard: Shard, machine: Machine
    ) -> OverPages:
        shape = self.config.attention
        if isinstance(shape, LlamaShape):
            assert isinstance(w.attention, LlamaAttention)
            if shard.num_parts("kv_tokens") > 1:
                raise ModelError("a draft with Llama's attention keeps no KV whose blocks are cut over devices")
            return functools.partial(_llama, shape, w.attention, pages, self.page_layer, batch, machine)
        return functools.partial(self._latent, w.attention, pages, batch, shard, machine)

    def _latent(
        self,
        w: Any,
        pages: Pages,
        batch: Batch,
        shard: Shard,
        machine: Machine,
        both: Float[Array, "n t d2"],
    ) -> tuple[Float[Array, "n t d"], Pages]:
        shape = self.config.attention
        assert not isinstance(shape, LlamaShape)
        attend = functools.partial(attend_paged, shard=shard, attention=absorbed(machine), machine=machine)
        rotary = cos_and_sin(shape, batch.positions)
        where = (pages, jnp.int32(self.page_layer), batch, rotary)
        return self_attention(shape, w, both, *where, attend, expanded_in_xla(machine), shard)


def _placed(weights: EagleWeights[Array], machine: Machine) -> EagleWeights[Any]:
    """As the machine's kernels read them, where it has any."""
    return in_place(weights, machine.kernel_rows) if machine.reads_in_place else weights


def _llama(
    shape: LlamaShape,
    w: LlamaAttention[Array],
    pages: Pages,
    page_layer: int,
    batch: Batch,
    machine: Machine,
    both: Float[Array, "n t d2"],
) -> tuple[Float[Array, "n t d"], Pages]:
    tables, positions = batch.block_tables[:, 0], batch.positions
    queries, keys, values = forward.project(shape, w, both, positions)
    heads = _heads(shape, pages.shape[-1], page_layer)
    pages = heads.write(pages, tables, positions, keys, values)
    return forward.joined(w, grouped_attention(queries, pages, tables, positions, heads, machine)), pages


def _heads(shape: LlamaShape, num_features: int, page_layer: int) -> PagedHeads:
    sizes = {"num_heads": shape.num_kv_heads, "head_dim": shape.head_dim, "num_features": num_features}
    return PagedHeads(**sizes, first_layer=page_layer)
