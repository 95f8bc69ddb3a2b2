"""The shape of the draft, as its config.json says it: 0.92 million parameters, embeddings and head borrowed."""

from typing import Any

from moonshard.experiments.training.shape import BOS, EOS, HUGGING_FACE_CONFIG, MAX_POSITIONS, VOCAB_SIZE

HUGGING_FACE_DRAFT: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": BOS,
    "draft_vocab_size": VOCAB_SIZE,
    # outputs of the first, the third and the fourth of five layers: what a token is, and what is about to be said
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3], "use_aux_hidden_state": True},
    "eos_token_id": EOS,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": HUGGING_FACE_CONFIG["hidden_size"],
    "intermediate_size": 512,
    "max_position_embeddings": MAX_POSITIONS,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "target_hidden_size": HUGGING_FACE_CONFIG["hidden_size"],
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
}
