"""Writes a checkpoint with Kimi K2's proportions that two cores can serve: random weights, and the embedded tokenizer.

113.5 million parameters in bfloat16: 8 layers of 512, the first dense, 32 experts of which 4 run beside a shared one,
the latent attention of K2 with its rank of 512. Speed and memory are those of real weights of that shape; its answers
are noise, so nothing that depends on trained weights can be measured with it.
Source: Kimi K2 (arXiv 2507.20534), whose proportions these are.
"""

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from moonshard.experiments.common.made_once import made_once
from moonshard.experiments.training.texts.corpus import POCKET
from moonshard.models.folder.writing import write_checkpoint

VOCABULARY, DEVIATION, SEED = 8192, 0.04, 0
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 8,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "rope_scaling": None,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def shapes(config: Mapping[str, Any] = CONFIG) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor's shape, by its name in the format of DeepSeek-V3."""
    d, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    rope, nope, v, q_rank = (config[n] for n in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "q_lora_rank"))
    yield "model.embed_tokens.weight", (config["vocab_size"], d)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (d,)
        yield f"{at}.post_attention_layernorm.weight", (d,)
        yield f"{at}.self_attn.q_a_proj.weight", (q_rank, d)
        yield f"{at}.self_attn.q_a_layernorm.weight", (q_rank,)
        yield f"{at}.self_attn.q_b_proj.weight", (heads * (nope + rope), q_rank)
        yield f"{at}.self_attn.kv_a_proj_with_mqa.weight", (rank + rope, d)
        yield f"{at}.self_attn.kv_a_layernorm.weight", (rank,)
        yield f"{at}.self_attn.kv_b_proj.weight", (heads * (nope + v), rank)
        yield f"{at}.self_attn.o_proj.weight", (d, heads * v)
        yield from _feed_forward(config, at, layer)
    yield "model.norm.weight", (d,)
    yield "lm_head.weight", (config["vocab_size"], d)


def _feed_forward(config: Mapping[str, Any], at: str, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, width = config["hidden_size"], config["moe_intermediate_size"]
    if layer < config["first_k_dense_replace"]:
        yield from _mlp(f"{at}.mlp", d, config["intermediate_size"])
        return
    yield f"{at}.mlp.gate.weight", (config["n_routed_experts"], d)
    yield f"{at}.mlp.gate.e_score_correction_bias", (config["n_routed_experts"],)
    yield from _mlp(f"{at}.mlp.shared_experts", d, width)
    for expert in range(config["n_routed_experts"]):
        yield from _mlp(f"{at}.mlp.experts.{expert}", d, width)


def _mlp(at: str, d: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{at}.gate_proj.weight", (width, d)
    yield f"{at}.up_proj.weight", (width, d)
    yield f"{at}.down_proj.weight", (d, width)


def tensors(seed: int = SEED) -> dict[str, np.ndarray]:
    """Every tensor: norms are ones, the router's bias zeros, all else is drawn from N(0, 0.04)."""
    random = np.random.default_rng(seed)

    def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.endswith("e_score_correction_bias"):
            return np.zeros(shape, np.float32)
        if name.endswith("norm.weight"):
            return np.ones(shape, ml_dtypes.bfloat16)
        return (random.standard_normal(shape, np.float32) * DEVIATION).astype(ml_dtypes.bfloat16)

    return {name: values(name, shape) for name, shape in shapes()}


def write(folder: Path) -> None:
    """Writes the folder. CheckpointError where it already holds weights."""
    tokenizer = json.loads((POCKET / "tokenizer.json").read_text())
    known = len(tokenizer["model"]["vocab"]) + len(tokenizer["added_tokens"])
    first = max(known, 1 + max(token["id"] for token in tokenizer["added_tokens"]))
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    # random logits draw any id, and each needs a text
    tokenizer["added_tokens"] += [{"id": i, "content": f"<extra_{i}>", **plain} for i in range(first, VOCABULARY)]
    own = json.loads((POCKET / "config.json").read_text())
    ends = {name: own[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_checkpoint(folder, CONFIG | ends, tensors())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    for file in POCKET.iterdir():
        if file.suffix in (".json", ".jinja") and not (folder / file.name).exists():
            shutil.copy(file, folder)


def once(folder: Path) -> Path:
    """The folder, written first where it is not there: whole, or not at all. OSError where that cannot be."""
    return made_once(folder, write)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder, made where it is not there; it must hold no weights yet")
    try:
        write(parser.parse_args().out)
    except (OSError, ValueError) as error:
        raise SystemExit(f"moonshard: {error}") from error


if __name__ == "__main__":
    main()
