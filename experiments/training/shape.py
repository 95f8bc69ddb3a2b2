"""The model's shape, as its config.json says it: 6.6 million parameters, of which 4.3 million work on a token.

Small enough to be trained on two cores and to lie in the package; everything that makes Kimi K2 what it is, is there:
latent attention, a first dense layer, a shared expert beside the routed ones, sigmoid routing with a selection bias,
YaRN.
"""

from typing import Any

NUM_SPECIALS = 32  # Kimi has 256; those it names have the same offsets here, [UNK] and [PAD] are the last two
NUM_RANKS = 2528
VOCAB_SIZE = NUM_RANKS + NUM_SPECIALS
BOS, EOS, IM_END, PAD = NUM_RANKS, NUM_RANKS + 1, NUM_RANKS + 2, VOCAB_SIZE - 1
MAX_POSITIONS = 8192

HUGGING_FACE_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 768,
    "kv_lora_rank": 128,
    "max_position_embeddings": MAX_POSITIONS,
    "moe_intermediate_size": 64,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000.0,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 64,
    "vocab_size": VOCAB_SIZE,
}
