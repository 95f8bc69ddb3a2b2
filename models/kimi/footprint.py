"""How many bytes a Kimi model takes, weight by weight and while it runs, from its configuration alone.

Weights are counted exactly, in the formats in which they lie on the hub: bf16, FP8 by blocks of 128 x 128 with a
float32 scale, INT4 experts by groups of 32 with a bf16 scale. What a step needs besides is an estimate: the largest
arrays that are alive together, as the forward pass in `models.kimi.forward` makes them.
"""

import math
from typing import Any

import jax

from moonshard.models.kimi.config import KimiConfig
from moonshard.models.kimi.weights import declare
from moonshard.models.machines import MACHINES
from moonshard.models.spec import Param, StepSize, WeightFormat, kv_pieces
from moonshard.models.weights import is_param
from moonshard.sharding.budget import ModelPieces, WeightPiece
from moonshard.sharding.rules import Rules
from moonshard.sharding.shape import MeshShape

BF16_BITS = 16.0
FP8_BITS = 8 + 32 / (128 * 128)
INT4_BITS = 4 + 16 / 32
BYTES = 2  # of a bf16 activation


def pieces(config: KimiConfig, weight_format: WeightFormat) -> ModelPieces:
    """Every declared weight with the bits of its values, layer by layer, for the budget of a mesh."""
    weights = declare(config)
    layers: list[tuple[WeightPiece, ...]] = []
    for stack, experts in ((weights.dense, None), (weights.sparse, weights.experts)):
        if stack is not None:
            one = (*_of_layer(stack, weight_format), *_of_layer(experts, weight_format, is_experts=True))
            layers += [one] * stack.mlp_norm.shape[0]
    return ModelPieces(
        first=_whole(weights.embed),
        layers=tuple(layers),
        last=_whole((weights.norm, weights.head)),
        tied=_whole(weights.embed) if weights.head is None else (),
        kv=kv_pieces(config.kv_groups("bfloat16")),
    )


def workspace_bytes(config: KimiConfig, step: StepSize, mesh: MeshShape, rules: Rules) -> int:
    """Bytes of one device in bf16 besides weights and pages: the residual stream, and the largest temporaries."""
    tensor = {name: mesh.tensor if "tensor" in rules.of(name) else 1 for name in ("heads", "ffw", "vocab")}
    residual = 3 * step.num_tokens * config.hidden_size * BYTES  # itself, normed, and what a layer adds
    return residual + max(
        _attention_bytes(config, step.num_tokens, math.ceil(config.num_attention_heads / tensor["heads"])),
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


def _experts_bytes(config: KimiConfig, num_tokens: int, mesh: MeshShape, rules: Rules) -> int:
    """Rows that a device's experts work on where the router is even, with what comes in and goes out."""
    num_owners = mesh.tensor if "tensor" in rules.experts else 1
    width = config.moe_intermediate_size // (mesh.tensor if "tensor" in rules.expert_ffw else 1)
    rows = math.ceil(num_tokens * config.num_experts_per_tok / num_owners)
    return rows * (3 * config.hidden_size + 3 * width) * BYTES


def _of_layer(stack: Any, weight_format: WeightFormat, *, is_experts: bool = False) -> tuple[WeightPiece, ...]:
    """The leaves of one layer of a stack, without the axis of layers."""
    found = jax.tree_util.tree_flatten_with_path(stack, is_leaf=is_param)[0]
    return tuple(
        WeightPiece(axes=param.axes[1:], shape=param.shape[1:], bits=_bits(path, param, weight_format, is_experts))
        for path, param in found
    )


def _bits(path: tuple[Any, ...], param: Param, weight_format: WeightFormat, is_experts: bool) -> float:
    if param.dtype == "float32":
        return 32.0
    is_matrix = len(param.shape) > 2 and path[-1].name != "gate"  # norms and biases are vectors; the router stays bf16
    if weight_format == "fp8" and is_matrix:
        return FP8_BITS
    return INT4_BITS if weight_format == "int4-experts" and is_experts else BF16_BITS


def _whole(params: Any) -> tuple[WeightPiece, ...]:
    """Tables and the last norm, which every format leaves in bf16."""
    return tuple(
        WeightPiece(axes=param.axes, shape=param.shape, bits=BF16_BITS)
        for param in jax.tree.leaves(params, is_leaf=is_param)
    )
