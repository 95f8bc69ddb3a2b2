"""How many bytes a Kimi model takes, weight by weight and while it runs, from its configuration alone.

Weights are counted exactly, by what `models.formats` says of each format. What a step needs besides is an estimate: the
largest arrays that are alive together, as the forward pass in `models.kimi.forward` makes them.
"""

import math
from typing import Any

import jax

from moonshard.models.expanded_attention import num_queries_to_expand
from moonshard.models.formats.sizes import Held, bits, held_in, values_together
from moonshard.models.gpu import card
from moonshard.models.kimi.config import KimiConfig
from moonshard.models.kimi.weights import declare
from moonshard.models.machines import MACHINES
from moonshard.models.spec import StepSize, WeightFormat, kv_pieces
from moonshard.models.weights import is_param
from moonshard.sharding.budget import ModelPieces, WeightPiece
from moonshard.sharding.rules import Rules
from moonshard.sharding.shape import MeshShape

BYTES = 2  # of a bf16 activation


def pieces(config: KimiConfig, held: WeightFormat | Held) -> ModelPieces:
    """Every declared weight with the bits of its values, layer by layer, for the budget of a mesh."""
    own = held if callable(held) else held_in(held)
    weights = declare(config)
    layers: list[tuple[WeightPiece, ...]] = []
    for stack, experts in ((weights.dense, None), (weights.sparse, weights.experts)):
        if stack is not None:
            layers += [_pieces((stack, experts), own, first_axis=1)] * stack.mlp_norm.shape[0]
    return ModelPieces(
        first=_pieces(weights.embed, own),
        layers=tuple(layers),
        last=_pieces((weights.norm, weights.head), own),
        tied=_pieces(weights.embed, own) if weights.head is None else (),
        kv=kv_pieces(config.kv_groups("bfloat16")),
    )


def workspace_bytes(config: KimiConfig, step: StepSize, mesh: MeshShape, rules: Rules) -> int:
    """Bytes of one device in bf16 besides weights and pages: the residual stream, and the largest temporaries."""
    tensor = {name: mesh.tensor if "tensor" in rules.of(name) else 1 for name in ("heads", "ffw", "vocab")}
    residual = 3 * step.num_tokens * config.hidden_size * BYTES  # itself, normed, and what a layer adds
    num_heads = math.ceil(config.num_attention_heads / tensor["heads"])
    return residual + max(
        _attention_bytes(config, step.num_tokens, num_heads),
        _expanded_bytes(config, step.num_tokens, num_heads) if card.EXPANDS_PROMPTS else 0,
        step.num_tokens * 3 * math.ceil(config.intermediate_size / tensor["ffw"]) * BYTES,
        _experts_bytes(config, step.num_tokens, mesh, rules),
        step.num_logits * (config.vocab_size + math.ceil(config.vocab_size / tensor["vocab"])) * 4,
    )


def _attention_bytes(config: KimiConfig, num_tokens: int, num_heads: int) -> int:
    per_head = (
        (config.qk_head_dim + config.latent_size + config.v_head_dim) * BYTES  # queries, absorbed ones, values
        + config.kv_lora_rank * (4 + BYTES)  # weighted latents, summed in float32
        + MACHINES["gpu"].keys * (4 + BYTES)  # scores
    )
    return num_tokens * num_heads * per_head


def _expanded_bytes(config: KimiConfig, num_tokens: int, num_heads: int) -> int:
    """Of `gpu.attention.expanded`: a whole panel, whatever contexts are there, and what goes on to the next.

    Of too few queries to expand for there is none.
    """
    least = num_queries_to_expand(config.kv_lora_rank, config.qk_nope_head_dim, config.v_head_dim)
    if least is None or num_tokens < least:
        return 0
    per_key = num_heads * (config.qk_nope_head_dim + config.v_head_dim) * BYTES
    latents = card.PANEL_BYTES // per_key * config.latent_size * BYTES
    per_query = (config.qk_head_dim + config.v_head_dim) * BYTES + (config.v_head_dim + 2) * 4  # sums, peak and total
    return card.PANEL_BYTES + latents + num_tokens * num_heads * per_query


def _experts_bytes(config: KimiConfig, num_tokens: int, mesh: MeshShape, rules: Rules) -> int:
    """Rows that a device's experts work on where the router is even, with what comes in and goes out."""
    num_owners = mesh.tensor if "tensor" in rules.experts else 1
    width = config.moe_intermediate_size // (mesh.tensor if "tensor" in rules.expert_ffw else 1)
    rows = math.ceil(num_tokens * config.num_experts_per_tok / num_owners)
    return rows * (3 * config.hidden_size + 3 * width) * BYTES


def _pieces(params: Any, own: Held, *, first_axis: int = 0) -> tuple[WeightPiece, ...]:
    """`first_axis` 1: of one layer of a stack."""
    return tuple(
        WeightPiece(
            axes=param.axes[first_axis:],
            shape=param.shape[first_axis:],
            bits=bits(param, held),
            values_together=values_together(held),
        )
        for param in jax.tree.leaves(params, is_leaf=is_param)
        for held in (own(param),)
    )
