"""What transformers makes of a folder, whatever its number format: logits, and the values of the first two experts.

    .venv-oracle/bin/python -m tests.oracle.read_folder FOLDER OUT.npz TOKEN ...        (in the repository's root)

`logits` [T, V] float32; `gate_up` [2, 2F, D] and `down` [2, D, F] of the first layer with experts. In float32, but
that transformers computes with experts in INT4 in bfloat16, and rounds dense matrices in FP8 to it.
"""
# pyright: reportMissingImports=false
# torch and transformers live in .venv-oracle, not in the environment that checks types.

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DeepseekV3ForCausalLM, FineGrainedFP8Config

from tests.oracle import tiny


def read(folder: Path, tokens: list[int]) -> dict[str, Any]:
    stored = json.loads((folder / "config.json").read_text()).get("quantization_config") or {}
    options: dict[str, Any] = {}
    if stored.get("quant_method") == "fp8":
        options["quantization_config"] = FineGrainedFP8Config(dequantize=True)  # its kernels are for GPUs
    model = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    if options:
        model = model.float()  # dense matrices were dequantised to bfloat16, and the others to what was asked for
    experts = model.model.layers[model.config.first_k_dense_replace].mlp.experts
    with torch.inference_mode():
        return {
            "logits": model(torch.tensor([tokens])).logits[0].float().numpy(),
            "gate_up": experts.gate_up_proj[:2].float().numpy(),
            "down": experts.down_proj[:2].float().numpy(),
        }


if __name__ == "__main__":
    tiny.settle()
    np.savez(sys.argv[2], **read(Path(sys.argv[1]), [int(token) for token in sys.argv[3:]]))  # pyright: ignore[reportArgumentType]
