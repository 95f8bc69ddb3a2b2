"""What a step has to do at the least, and how long a machine needs for it at the rates measured on that machine.

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
    """Rates that a machine reached in this run."""

    bytes_per_s: float  # of a card: copying, read plus written; of a CPU: reading
    matmul_flops_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The least bytes and operations that a part of a step needs."""

    num_bytes: float
    num_flops: float

    def __add__(self, other: "Work") -> "Work":
        return Work(num_bytes=self.num_bytes + other.num_bytes, num_flops=self.num_flops + other.num_flops)

    def times(self, count: float) -> "Work":
        return Work(num_bytes=self.num_bytes * count, num_flops=self.num_flops * count)

    def floor_s(self, ceilings: Ceilings) -> float:
        return max(self.num_bytes / ceilings.bytes_per_s, self.num_flops / ceilings.matmul_flops_per_s)


NOTHING = Work(num_bytes=0, num_flops=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemBytes:
    """The bytes of one value, as it lies in memory, scales included."""

    weights: float
    kv: float
    experts: float | None = None  # where routed experts differ from other weights

    @property
    def of_experts(self) -> float:
        return self.weights if self.experts is None else self.experts


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """A step's parts, all layers together."""

    routed: Work  # experts
    attention: Work  # over cached keys
    projections: Work  # around attention
    mlp: Work  # dense layers and shared experts
    router: Work
    head: Work

    @property
    def rest(self) -> Work:
        """All but routed experts and attention."""
        return self.projections + self.mlp + self.router + self.head

    @property
    def whole(self) -> Work:
        return self.routed + self.attention + self.rest

    def floor_s(self, ceilings: Ceilings) -> float:
        return sum(part.floor_s(ceilings) for part in (self.routed, self.attention, self.rest))


def expected_experts(model: LatentModel, num_tokens: int) -> float:
    """Distinct experts of a layer that so many tokens hit, where each takes any with the same probability."""
    num_experts, top_k = model.config.n_routed_experts, model.config.num_experts_per_tok
    return num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)


def routed_work(model: LatentModel, num_tokens: int, num_experts_hit: float, item_bytes: float) -> Work:
    """One layer's routed experts."""
    expert_size = 3 * model.config.hidden_size * model.config.moe_intermediate_size
    return Work(
        num_bytes=num_experts_hit * expert_size * item_bytes,
        num_flops=2 * num_tokens * model.config.num_experts_per_tok * expert_size,
    )


def attention_work(model: LatentModel, spans: Iterable[tuple[int, int]], item_bytes: float) -> Work:
    """One layer's absorbed attention over cached latents, without projections.

    Args:
        spans: of each sequence, the first position of its queries and the one after the last.
    """
    keys = pairs = 0
    for start, stop in spans:
        keys += stop
        pairs += _num_pairs(start, stop)
    flops_per_pair = 2 * model.config.num_attention_heads * (model.config.latent_size + model.config.kv_lora_rank)
    return Work(num_bytes=keys * model.config.latent_size * item_bytes, num_flops=pairs * flops_per_pair)


def expanded_attention_work(model: LatentModel, spans: Iterable[tuple[int, int]], item_bytes: float) -> Work:
    """The same with keys and values expanded from the latents: less to compute where queries are many.

    What expands a query's own token is counted among the projections, which both forms have; that of tokens before
    the queries is counted here.
    """
    config, keys, before, pairs = model.config, 0, 0, 0
    for start, stop in spans:
        keys += stop
        before += start
        pairs += _num_pairs(start, stop)
    expansion = config.kv_lora_rank * (config.qk_nope_head_dim + config.v_head_dim)
    per_pair = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    return Work(
        num_bytes=keys * config.latent_size * item_bytes,
        num_flops=2 * config.num_attention_heads * (pairs * per_pair + before * expansion),
    )


def _num_pairs(start: int, stop: int) -> int:
    """Of queries at positions from `start` to `stop` and the keys that they see."""
    return (stop * (stop + 1) - start * (start + 1)) // 2


def step_work(
    model: LatentModel,
    spans: Sequence[tuple[int, int]],
    experts_hit: Sequence[float],
    item_bytes: float | ItemBytes,
) -> StepWork:
    """A step over the positions `spans` of some sequences, with one row of logits for each sequence.

    Attention takes the form, absorbed or expanded, that computes less.

    Args:
        experts_hit: distinct experts of each MoE layer.
    """
    size = item_bytes if isinstance(item_bytes, ItemBytes) else ItemBytes(weights=item_bytes, kv=item_bytes)
    num_tokens = sum(stop - start for start, stop in spans)
    routed = NOTHING
    for hit in experts_hit:
        routed += routed_work(model, num_tokens, hit, size.of_experts)
    forms = (attention_work(model, spans, size.kv), expanded_attention_work(model, spans, size.kv))
    declared = model.declare()
    stacks = [stack for stack in (declared.dense, declared.sparse) if stack is not None]

    def product(params: Any, num_rows: int) -> Work:
        return Work(num_bytes=num_values(params) * size.weights, num_flops=2 * num_rows * num_values(params))

    table = declared.embed if declared.head is None else declared.head
    return StepWork(
        routed=routed,
        attention=min(forms, key=lambda form: form.num_flops).times(model.config.num_hidden_layers),
        projections=product([stack.attention for stack in stacks], num_tokens),
        mlp=product([(stack.mlp, stack.mlp_norm) for stack in stacks], num_tokens),
        router=product([stack.router for stack in stacks], num_tokens),
        head=product(table, len(spans)),
    )


def num_values(params: Any) -> int:
    """Of a declared tree."""
    return sum(math.prod(param.shape) for param in jax.tree.leaves(params, is_leaf=weights.is_param))
