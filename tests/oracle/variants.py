"""Builds the architectures of variants.json as tiny folders, each with the reference that transformers computes.

    .venv-oracle/bin/python -m tests.oracle.variants OUT [name ...]        (in the repository's root)

`OUT/<name>/ref.npz`: `prompt` [80], `greedy` [16], `logits` [96, V] float32 over prompt and greedy tokens. Seeds are
redrawn until no greedy step and no router's choice is a near-tie.
"""
# pyright: reportMissingImports=false
# torch and transformers live in .venv-oracle, not in the environment that checks types.

import json
import sys
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from tests.oracle import tiny

VOCAB = 512
PROMPT_TOKENS = 80
GREEDY_TOKENS = 16
MIN_MARGIN = 0.02
MIN_ROUTER_MARGIN = 1e-4
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
PLAIN: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
    "attention_bias": False,
}


def build(folder: Path, variant: dict[str, Any]) -> int:
    """Writes the folder and its reference; returns the seed that was good."""
    folder.mkdir(parents=True)
    for seed in count(1):
        save(folder, variant, seed)
        if (reference := measure(folder, seed)) is not None:
            np.savez_compressed(folder / "ref.npz", allow_pickle=False, **reference)
            return seed
    raise AssertionError("unreachable")


def save(folder: Path, variant: dict[str, Any], seed: int) -> None:
    model = DeepseekV3ForCausalLM(configure(variant.get("config", {})))
    tiny.randomize(model, seed, bias_mean=variant.get("bias_mean", 0.0))
    if variant.get("dtype") != "float32":
        model = tiny.to_bfloat16(model)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    spelling = variant.get("spelling", "type")
    config = written if spelling == "transformers_5" else tiny.spell_as_on_the_hub(written, spelling)
    config["model_type"] = variant.get("model_type", "deepseek_v3")
    tiny.write_json(folder / "config.json", config)


def configure(changes: dict[str, Any]) -> DeepseekV3Config:
    scaling = changes.get("rope_scaling", {})
    yarn = None if scaling is None else {**YARN, **scaling}
    return DeepseekV3Config(**{**PLAIN, **changes, "rope_scaling": yarn})


def measure(folder: Path, seed: int) -> dict[str, np.ndarray] | None:
    """The reference of the folder as it lies on disk, or None where a tie would make it worthless."""
    model = tiny.load(folder)
    prompt = np.random.default_rng(seed).integers(3, VOCAB, PROMPT_TOKENS)
    greedy = tiny.greedy(model, prompt.tolist(), GREEDY_TOKENS)
    logits, routed = tiny.logits_of(model, [*prompt, *greedy])
    margin = tiny.top2_margin(logits[PROMPT_TOKENS - 1 : -1]).min()
    if margin < MIN_MARGIN or tiny.router_margin(model, routed).min() < MIN_ROUTER_MARGIN:
        return None
    return {"prompt": prompt, "greedy": greedy, "logits": logits.astype(np.float32)}


def main(out: str, *names: str) -> None:
    tiny.settle(num_threads=1)  # two would spin against whatever else the tests run
    variants = json.loads(Path(__file__).with_name("variants.json").read_text())
    for name in names or variants:
        seed = build(Path(out) / name, variants[name])
        sys.stdout.write(f"{name}: seed {seed}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
