"""A checkpoint folder of the windowed model, written anew for each run of tests: small, and the same each time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moonshard.models.folder.writing import write_checkpoint
from tests.windowed.model import FULL, MODEL_TYPE, SLIDING

SEED = 93  # with it no greedy step that tests look at is a near-tie: `test_no_greedy_step_is_a_near_tie`
VOCAB_SIZE = 64
WINDOW = 40
LAYER_TYPES = (FULL, SLIDING, FULL, SLIDING)
CONFIG: dict[str, Any] = {
    "model_type": MODEL_TYPE,
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "head_dim": 16,
    "layer_types": list(LAYER_TYPES),
    "sliding_window": WINDOW,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}


def write_folder(folder: Path, layer_types: Sequence[str] = LAYER_TYPES) -> Path:
    write_checkpoint(folder, {**CONFIG, "layer_types": list(layer_types)}, _tensors(np.random.default_rng(SEED)))
    return folder


def a_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Arbitrary tokens. Prompts of one seed begin alike."""
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, num_tokens).tolist()


def _tensors(draws: np.random.Generator) -> dict[str, np.ndarray]:
    d, f, v = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    heads = CONFIG["num_attention_heads"] * CONFIG["head_dim"]

    def normal(shape: Sequence[int], scale: float, mean: float = 0.0) -> np.ndarray:
        return (mean + scale * draws.standard_normal(shape)).astype(np.float32)

    def matrix(num_out: int, num_in: int, gain: float = 1.2) -> np.ndarray:
        return normal((num_out, num_in), gain * num_in**-0.5)

    tensors = {"model.embed_tokens.weight": normal((v, d), 1.0)}
    for layer in range(CONFIG["num_hidden_layers"]):
        of_layer = {
            "input_layernorm": normal((d,), 0.1, 1.0),
            "self_attn.q_proj": matrix(heads, d),
            "self_attn.k_proj": matrix(heads, d),
            "self_attn.v_proj": matrix(heads, d, 2.0),
            "self_attn.o_proj": matrix(d, heads, 2.0),
            "post_attention_layernorm": normal((d,), 0.1, 1.0),
            "mlp.gate_proj": matrix(f, d),
            "mlp.up_proj": matrix(f, d),
            "mlp.down_proj": matrix(d, f),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in of_layer.items()}
    return tensors | {"model.norm.weight": normal((d,), 0.1, 1.0), "lm_head.weight": matrix(v, d, 3.0)}
