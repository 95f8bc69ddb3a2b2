"""What a stage computes, and where."""

from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from moonshard.models.draft import Draft
from moonshard.models.experts import moe
from moonshard.models.machines import XLA, Machine
from moonshard.models.model import ExpandedAttention, Model, PagedAttention
from moonshard.sharding.experts import ExpertPlacement
from moonshard.sharding.shard import Shard


@dataclass(frozen=True, kw_only=True, slots=True)
class StageDraft:
    """A draft model behind the last layer of a stage. `weights` as of `StageModel`, with the tables it borrows."""

    model: Draft  # in the layers of the pages that follow the stage's own
    weights: Any
    num_page_layers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StageModel:
    """What a stage computes, and where. `weights` lie on the mesh as the rules of `shard` say; they may be abstract."""

    model: Model
    layers: range
    weights: Any
    mesh: Mesh
    shard: Shard
    backend: moe.Backend
    placement: ExpertPlacement | None = None  # that the weights were declared with
    attention: PagedAttention | None = None  # kernels for GPUs
    expanded: ExpandedAttention | None = None  # likewise, for many tokens of a sequence; None: `attention` does it all
    machine: Machine = XLA
    draft: StageDraft | None = None

    def declared(self) -> Any:
        """The parameters that `weights` are of, in the same tree."""
        return self.model.declare(self.layers, self.placement)

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.model.config.num_hidden_layers
