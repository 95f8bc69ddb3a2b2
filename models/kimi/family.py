"""Kimi K2 and DeepSeek-V3 as a `Model`: what `models.registry` gives for their folders."""

from dataclasses import dataclass

import numpy as np

from moonshard.kv.pages import Pages
from moonshard.models.experts import moe
from moonshard.models.formats.sizes import Held
from moonshard.models.kimi import footprint, forward, rotary, weights
from moonshard.models.kimi.config import KimiConfig
from moonshard.models.machines import XLA, Machine
from moonshard.models.model import Attend, Batch, ExpandedAttention, Observations, PagedAttention
from moonshard.models.spec import KvGroup, Param, StepSize, WeightFormat
from moonshard.sharding.arrays import Array, Float
from moonshard.sharding.budget import ModelPieces
from moonshard.sharding.experts import ExpertPlacement
from moonshard.sharding.rules import Rules
from moonshard.sharding.shape import MeshShape
from moonshard.sharding.shard import ALONE, Shard


@dataclass(frozen=True, slots=True)
class Kimi:
    """A model of the family; see `models.model.Model` for what its methods promise."""

    config: KimiConfig

    def declare(self, layers: range | None = None, placement: ExpertPlacement | None = None) -> weights.Weights[Param]:
        return weights.declare(self.config, layers, placement)

    def kv_groups(self, dtype: str) -> tuple[KvGroup, ...]:
        return self.config.kv_groups(dtype)

    def forward(
        self,
        weights: weights.Weights[Array],
        pages: Pages,
        batch: Batch,
        *,
        hidden: Float[Array, "n t d"] | None = None,
        backend: moe.Backend = moe.blocks,
        attend: Attend | None = None,
        shard: Shard = ALONE,
        placement: ExpertPlacement | None = None,
        observe: bool = False,
        taps: tuple[int, ...] = (),
        unrolled: bool = False,
        machine: Machine = XLA,
        chunk_tokens: int | None = None,
        attention: PagedAttention | None = None,
        expanded: ExpandedAttention | None = None,
    ) -> tuple[Float[Array, "n t d"], Pages, Observations | None]:
        return forward.forward(
            self.config,
            weights,
            pages,
            batch,
            hidden=hidden,
            backend=backend,
            attend=attend,
            shard=shard,
            placement=placement,
            observe=observe,
            taps=taps,
            unrolled=unrolled,
            machine=machine,
            chunk_tokens=chunk_tokens,
            attention=attention,
            expanded=expanded,
        )

    def unembed(
        self,
        weights: weights.Weights[Array],
        hidden: Float[Array, "b d"],
        shard: Shard = ALONE,
        *,
        machine: Machine = XLA,
    ) -> Float[Array, "b v"]:
        return forward.unembed(weights, hidden, shard, machine=machine)

    def pieces(self, weights: WeightFormat | Held) -> ModelPieces:
        return footprint.pieces(self.config, weights)

    def workspace_bytes(self, step: StepSize, mesh: MeshShape, rules: Rules) -> int:
        return footprint.workspace_bytes(self.config, step, mesh, rules)

    # ---- of this family alone

    def rotary_frequencies(self) -> tuple[np.ndarray, float]:
        """Inverse frequencies [rope / 2] in float32, and the factor on cos and sin."""
        return rotary.rotary_frequencies(self.config)

    def softmax_scale(self) -> float:
        """Of the scores, before the softmax."""
        return rotary.softmax_scale(self.config)
