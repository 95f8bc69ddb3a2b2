"""The words in which a model describes itself to all other code: parameters, KV groups, errors.

A parameter is declared once. Its abstract array, its sharding, its random initial value and where it lies in a Hugging
Face checkpoint all follow from that one declaration (as in jax-llm-examples).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moonshard.sharding.budget import KvPiece

WeightFormat = Literal["bf16", "fp8", "int8", "int4-experts"]  # of a folder, as the budget names them


class ModelError(ValueError):
    """A model folder that cannot be served; the message names the field or tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvGroup:
    """Layers whose blocks are taken and given back together: a sequence has one block table for each group.

    A block is one group's: so many tokens of all of its layers. Blocks of all groups have one shape, so that a pool
    gives any block to any group. A group with fewer layers than another leaves the rest of its blocks unused: a model
    makes its groups as even as it can. Source: vLLM's hybrid KV cache manager.
    """

    name: str
    layers: tuple[int, ...]  # of the model, ascending; layer i of a block is the i-th of them
    num_features: int  # values per token and layer; the same in all groups of a model
    dtype: str
    window: int | None = None  # how many tokens back from its own, itself included, a query sees; None: all of them

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def itemsize_bytes(self) -> int:
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def layer_bytes_per_token(self) -> int:
        return self.num_features * self.itemsize_bytes


def kv_pieces(groups: Sequence[KvGroup]) -> tuple[KvPiece, ...]:
    """What the groups keep of each token, for the budget of a mesh."""
    return tuple(
        KvPiece(layers=group.layers, layer_bytes_per_token=group.layer_bytes_per_token, window=group.window)
        for group in groups
    )


def page_layers(groups: Sequence[KvGroup], layers: range) -> int:
    """How many layers a block has where these layers of the model are: as many as the largest group has there."""
    return max(sum(layer in layers for layer in group.layers) for group in groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSize:
    """How much work one step of one partition has: what an estimate of its memory is computed from."""

    num_tokens: int  # a chunk of a prompt, or the sequences that decode
    num_logits: int  # of which the next token is drawn


def matmul_precision(dtype: str) -> str:
    """For `jax.default_matmul_precision`: float32 in full, where an accelerator's default would round it."""
    return "highest" if dtype == "float32" else "default"


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """How a leaf's trailing dimensions lie in a tensor: it is reshaped, and a part taken of each dimension.

    Data and no function, since what is stored beside a tensor, such as scales, has to follow it.
    """

    shape: tuple[int, ...]
    part: tuple[slice, ...] = ()  # of the first dimensions; the others are whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Param:
    """One leaf of a weight tree.

    `shape` and `axes` (logical axis names, see `sharding.rules`) are of the whole leaf. Its leading `stacked`
    dimensions enumerate tensors of the checkpoint: `source(*leading_index)` names the tensor, and `view` gives the
    tensor, of shape `tensor_shape`, the leaf's trailing shape without copying.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    source: Callable[..., str]
    stacked: int = 0
    tensor_shape: tuple[int, ...] | None = None  # None: the leaf's trailing shape
    view: View | None = None  # None: the tensor as it is
    dtype: str | None = None  # None: the model's compute dtype
    initial: float | None = None  # every value at random initialisation; None: a fan-in scaled normal
    is_factor: bool = False  # a matrix that only products take: it may be held in a format of its own

    @property
    def whole_tensor(self) -> tuple[int, ...]:
        """The shape of one of its tensors."""
        return self.tensor_shape or self.shape[self.stacked :]

    @property
    def num_own(self) -> int:
        """How many dimensions it has of its own, behind the stacked ones."""
        return len(self.shape) - self.stacked

    def tensors(self) -> Iterator[str]:
        """The names of all its tensors, one to each leading index."""
        return itertools.starmap(self.source, itertools.product(*map(range, self.shape[: self.stacked])))

    def viewed(self, tensor: np.ndarray) -> np.ndarray:
        """A tensor as the leaf's trailing dimensions have it, in the tensor's memory."""
        return tensor if self.view is None else tensor.reshape(self.view.shape)[self.view.part]
