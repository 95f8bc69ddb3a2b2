"""Models known by name, for questions that need their shape and not their weights.

The values are those of each model's config.json, under its names. Fields that do not bear on shapes, such as the
scaling of positions, are missing: none of these models can be served from here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moonshard.models.spec import WeightFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownModel:
    config: Mapping[str, Any]  # as in config.json
    native: WeightFormat  # how its weights lie on the hub


_DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
}
_KIMI_K2 = _DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "rope_theta": 50000,
}
_MOONLIGHT = _KIMI_K2 | {
    "model_type": "deepseek_v3",
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 2.446,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
_POCKET = _KIMI_K2 | {
    "model_type": "deepseek_v3",
    "vocab_size": 2560,
    "hidden_size": 256,
    "intermediate_size": 768,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "kv_lora_rank": 128,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 8192,
    "rope_theta": 10000,
}
KNOWN: Mapping[str, KnownModel] = {
    "kimi-k2": KnownModel(config=_KIMI_K2, native="fp8"),
    "kimi-k2.5": KnownModel(
        config=_KIMI_K2 | {"max_position_embeddings": 262144, "rms_norm_eps": 1e-5}, native="int4-experts"
    ),
    "deepseek-v3": KnownModel(config=_DEEPSEEK_V3, native="fp8"),
    "moonlight-16b": KnownModel(config=_MOONLIGHT, native="bf16"),
    "pocket": KnownModel(config=_POCKET, native="bf16"),  # of `experiments/training`, and on no hub
}
