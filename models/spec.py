"""The words in which a model describes itself to all other code: parameters, KV groups, errors.

A parameter is declared once. Its abstract array, its sharding, its random initial value and where it lies in a Hugging
Face checkpoint all follow from that one declaration (as in jax-llm-examples).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

WeightFormat = Literal["bf16", "fp8", "int4-experts"]  # in a folder: what the budget counts, more than is served


class ModelError(ValueError):
    """A model folder that cannot be served; the message names the field or tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvGroup:
    """Layers that keep the same kind of cache: one array of pages."""

    name: str
    kind: Literal["full", "window", "state"]
    num_layers: int
    num_features: int  # values per token and layer
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.num_features * (2 if self.dtype == "bfloat16" else 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSize:
    """How much work one step of one partition has: what an estimate of its memory is computed from."""

    num_tokens: int  # a chunk of a prompt, or the sequences that decode
    num_logits: int  # of which the next token is drawn


def matmul_precision(dtype: str) -> str:
    """For `jax.default_matmul_precision`: float32 in full, where an accelerator's default would round it."""
    return "highest" if dtype == "float32" else "default"


def _as_it_is(tensor: np.ndarray) -> np.ndarray:
    return tensor


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
    view: Callable[[np.ndarray], np.ndarray] = _as_it_is
    dtype: str | None = None  # None: the model's compute dtype
    initial: float | None = None  # every value at random initialisation; None: a fan-in scaled normal
