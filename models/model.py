"""What all code outside `models` sees of a model: a value that declares weights and KV groups, runs, and counts bytes.

`models.registry` makes it from a folder; nobody outside `models` names a family or a class of one. A family is a folder
beside this file (`kimi`) with one class that has these methods.
"""

from typing import Any, Protocol, runtime_checkable

import numpy as np

from moonshard.kv.pages import Pages
from moonshard.models.experts import moe
from moonshard.models.formats.sizes import Held
from moonshard.models.machines import XLA, Machine
from moonshard.models.pytree import pytree
from moonshard.models.spec import KvGroup, StepSize, WeightFormat
from moonshard.sharding.arrays import Array, Float, Int
from moonshard.sharding.budget import ModelPieces
from moonshard.sharding.experts import ExpertPlacement
from moonshard.sharding.rules import Rules
from moonshard.sharding.shape import MeshShape
from moonshard.sharding.shard import ALONE, Shard


@pytree
class Batch:
    """Rows of tokens of one sequence each: tiles of prompts, or decode slots.

    `positions` below 0 are padding. A row's tokens are consecutive, and rows of one sequence may share a step: every
    row sees what all rows write. A row has a block table for each KV group, in the order of `Model.kv_groups`: the
    block of position p is in column p // block_size. Where the group has a window, columns that lie wholly before a
    row's window name blocks of something else: what is read there must be masked.
    """

    tokens: Int[Array, "n t"]
    positions: Int[Array, "n t"]
    block_tables: Int[Array, "n groups m"]


@pytree
class Observations:
    """What a numerics question asks of a forward pass."""

    hidden: Float[Array, "layers_and_embed n t d"] | None  # embeddings, then the residual stream after each layer
    experts: Int[Array, "moe_layers tokens k"] | None
    router_margin: Float[Array, "moe_layers tokens"] | None
    tapped: Float[Array, "n t taps d"] | None = (
        None  # where `taps` asked for some; without `observe` nothing else is here
    )


@runtime_checkable
class Attend(Protocol):
    """How absorbed queries attend to keys: over pages when serving, as in `models.training` for gradients."""

    def __call__(
        self,
        queries: Float[Array, "n t h f"],
        features: Float[Array, "n t f"],
        pages: Pages,
        layer: Int[Array, ""],
        batch: Batch,
        *,
        value_rank: int,
        scale: float,
    ) -> tuple[Float[Array, "n t h r"], Pages]: ...


@runtime_checkable
class PagedAttention(Protocol):
    """Attention of absorbed queries over paged latents on one device, as `models.attention.latent_attention`."""

    def __call__(
        self,
        queries: Float[Array, "n t h f"],
        pages: Pages,
        layer: Int[Array, ""],
        block_tables: Int[Array, "n m"],
        positions: Int[Array, "n t"],
        *,
        value_rank: int,
        scale: float,
    ) -> Float[Array, "n t h r"]: ...


@runtime_checkable
class ExpandedAttention(Protocol):
    """Attention of queries as they are over what paged latents stand for, as `models.expanded_attention` has it."""

    def __call__(
        self,
        queries: Float[Array, "n t h k"],
        pages: Pages,
        layer: Int[Array, ""],
        block_tables: Int[Array, "n m"],
        positions: Int[Array, "n t"],
        k_up: Float[Array, "h nope r"],
        v_up: Float[Array, "h v r"],
        *,
        scale: float,
    ) -> Float[Array, "n t h v"]: ...


@runtime_checkable
class ModelSizes(Protocol):
    """The sizes that every family has, under Hugging Face's names. Hashable: it stands in the keys of programs."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def n_routed_experts(self) -> int: ...
    @property
    def num_moe_layers(self) -> int:
        """0 where no layer routes."""
        ...

    def moe_layers(self, layers: range) -> slice:
        """Which of all MoE layers are among these layers of the model."""
        ...


@runtime_checkable
class Model(Protocol):
    """A model as a value. Weights are trees of the family's own: `Param` where declared, arrays where loaded."""

    @property
    def config(self) -> ModelSizes: ...

    def declare(self, layers: range | None = None, placement: ExpertPlacement | None = None) -> Any:
        """A tree of `Param`, each once, of these layers; of all by default.

        `placement` covers the MoE layers among them. Without one, each expert is there once, and they lie in order.
        """
        ...

    def kv_groups(self, dtype: str) -> tuple[KvGroup, ...]:
        """The groups of layers that share block tables; each layer is in one of them."""
        ...

    def forward(
        self,
        weights: Any,
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
        """Runs all layers of these weights over a batch of rows, writing what they cache into the pages.

        Args:
            hidden: the residual stream from the stage before; None on the first stage, which embeds the tokens.
            shard: what the device that runs this must know of its mesh; weights, pages and rows are its parts of them.
            placement: the one that these weights were declared with.
            taps: layers, distinct, counted from the first of these weights, at whose input the residual stream is kept:
                what a draft model reads. One copy of the stream a layer; none, and no other program, where there are no
                taps.
            unrolled: layers one after the other instead of in a loop. A gradient then copies nothing into stacks and
                out of them (a sixth of the time of the embedded model's on two cores), for a longer compilation.
            machine: what is best computed at once here. Where it has kernels for CPUs, a family that can leaves weights
                and pages where they lie, for these to read. They have no gradient.
            chunk_tokens: the most tokens that one sequence has in the batch, in all of its rows; None: a row's. It
                decides no more than what is faster.
            attention: what attends over pages instead, where a device has whole blocks. It has no gradient either.
            expanded: what attends instead of that with so many tokens of a sequence that expanding its keys is less
                work, likewise; None: `attention` does it all.

        Returns:
            The residual stream, on the last stage after the final norm; the pages; the observations if asked for, by
            `observe` or by `taps`.
        """
        ...

    def unembed(
        self, weights: Any, hidden: Float[Array, "b d"], shard: Shard = ALONE, *, machine: Machine = XLA
    ) -> Float[Array, "b v"]:
        """Logits in float32, of the last stage's weights. `machine` as for `forward`."""
        ...

    def pieces(self, weights: WeightFormat | Held) -> ModelPieces:
        """The bytes that the model takes, weight by weight, for the budget of a mesh.

        Args:
            weights: how it is stored, or what each parameter is held in.
        """
        ...

    def workspace_bytes(self, step: StepSize, mesh: MeshShape, rules: Rules) -> int:
        """An estimate of the bytes that one device needs in bf16 besides weights and pages."""
        ...


@runtime_checkable
class LatentConfig(ModelSizes, Protocol):
    """The sizes of a model with latent attention (MLA: DeepSeek-V2, arXiv 2405.04434, section 2.1) and experts."""

    @property
    def num_attention_heads(self) -> int: ...
    @property
    def kv_lora_rank(self) -> int: ...
    @property
    def qk_nope_head_dim(self) -> int: ...
    @property
    def qk_rope_head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...
    @property
    def latent_size(self) -> int:
        """Values cached per token and layer."""
        ...

    @property
    def num_dense_layers(self) -> int: ...
    @property
    def moe_intermediate_size(self) -> int: ...
    @property
    def num_experts_per_tok(self) -> int: ...
    @property
    def rope_interleave(self) -> bool: ...


@runtime_checkable
class LatentModel(Model, Protocol):
    """A model with latent attention: what measurements of that attention and training need of it besides `Model`."""

    @property
    def config(self) -> LatentConfig: ...

    def rotary_frequencies(self) -> tuple[np.ndarray, float]:
        """Inverse frequencies [rope / 2] in float32, and the factor on cos and sin."""
        ...

    def softmax_scale(self) -> float:
        """Of the scores, before the softmax."""
        ...
