"""What a step has to do at the least, and how long a card needs for it at the rates measured on that card.

Every weight that a step uses is read once, every visible key once per sequence; activations are taken to stay on
chip. Parts of a step follow one another, so its floor is the sum over parts of the slower of moving and computing.
Pure: shapes in, numbers out.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from moonshard.models import weights
from moonshard.models.model import LatentModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """Rates that a card reached in this run."""

    copy_bytes_per_s: float  # read plus written
    matmul_flops_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The least bytes and operations that a part of a step needs."""

    num_bytes: float
    num_flops: float

    def __add__(self, other: "Work") -> "Work":
        return Work(num_bytes=self.num_bytes + other.num_bytes, num_flops=self.num_flops + other.num_flops)

    def floor_s(self, ceilings: Ceilings) -> float:
        return max(self.num_bytes / ceilings.copy_bytes_per_s, self.num_flops / ceilings.matmul_flops_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """A step's parts, all layers together."""

    routed: Work
    attention: Work
    rest: Work

    @property
    def whole(self) -> Work:
        return self.routed + self.attention + self.rest

    def floor_s(self, ceilings: Ceilings) -> float:
        return sum(part.floor_s(ceilings) for part in (self.routed, self.attention, self.rest))


def routed_work(model: LatentModel, num_tokens: int, num_experts_hit: int, item_bytes: int) -> Work:
    """One layer's routed experts."""
    expert_size = 3 * model.config.hidden_size * model.config.moe_intermediate_size
    return Work(
        num_bytes=num_experts_hit * expert_size * item_bytes,
        num_flops=2 * num_tokens * model.config.num_experts_per_tok * expert_size,
    )


def attention_work(model: LatentModel, spans: Iterable[tuple[int, int]], item_bytes: int) -> Work:
    """One layer's absorbed attention over cached latents, without projections.

    Args:
        spans: of each sequence, the first position of its queries and the one after the last.
    """
    keys = pairs = 0
    for start, stop in spans:
        keys += stop
        pairs += sum(range(start + 1, stop + 1))
    flops_per_pair = 2 * model.config.num_attention_heads * (model.config.latent_size + model.config.kv_lora_rank)
    return Work(num_bytes=keys * model.config.latent_size * item_bytes, num_flops=pairs * flops_per_pair)


def rest_work(model: LatentModel, num_tokens: int, num_logits: int, item_bytes: int) -> Work:
    """Projections, dense layers, shared experts and routers for every token, and the head for the rows that need it."""
    declared = model.declare()
    layers, head = num_values((declared.dense, declared.sparse)), model.config.vocab_size * model.config.hidden_size
    return Work(num_bytes=(layers + head) * item_bytes, num_flops=2 * (num_tokens * layers + num_logits * head))


def step_work(
    model: LatentModel,
    spans: Sequence[tuple[int, int]],
    experts_hit: Sequence[int],
    item_bytes: int,
) -> StepWork:
    """A step over the positions `spans` of some sequences, with one row of logits for each sequence.

    Args:
        experts_hit: distinct experts of each MoE layer.
    """
    num_tokens = sum(stop - start for start, stop in spans)
    routed = Work(num_bytes=0, num_flops=0)
    for hit in experts_hit:
        routed += routed_work(model, num_tokens, hit, item_bytes)
    one = attention_work(model, spans, item_bytes)
    layers = model.config.num_hidden_layers
    return StepWork(
        routed=routed,
        attention=Work(num_bytes=layers * one.num_bytes, num_flops=layers * one.num_flops),
        rest=rest_work(model, num_tokens, len(spans), item_bytes),
    )


def num_values(params: Any) -> int:
    """Of a declared tree."""
    return sum(math.prod(param.shape) for param in jax.tree.leaves(params, is_leaf=weights.is_param))
