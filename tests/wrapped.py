"""A folder as Kimi K2.5's on the hub, made of a plain one: the same model, with a tower that sees beside it."""

import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.folder.writing import write_checkpoint

VISION = {
    "vision_tower.patch_embed.proj.weight": (8, 3, 14, 14),
    "vision_tower.encoder.blocks.0.wqkv.weight": (24, 8),
    "vision_tower.encoder.final_layernorm.bias": (8,),
    "mm_projector.proj.0.weight": (32, 32),
}
KEPT = ("tokenizer.json", "tiktoken.model", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def wrapped(plain: Path, folder: Path, **options: Any) -> Path:
    """Writes the folder; `options` are `write_checkpoint`'s."""
    checkpoint = Checkpoint.open(plain)
    tensors = {f"language_model.{name}": checkpoint.tensor(name) for name in checkpoint.names}
    tensors |= {name: np.ones(shape, ml_dtypes.bfloat16) for name, shape in VISION.items()}
    write_checkpoint(folder, wrapped_config(checkpoint.config), tensors, **options)
    copy_companions(plain, folder)
    return folder


def copy_companions(source: Path, folder: Path) -> None:
    """What stands beside weights and configuration."""
    for file in KEPT:
        if (source / file).exists():
            shutil.copy(source / file, folder)


def wrapped_config(text: dict[str, Any]) -> dict[str, Any]:
    """config.json of K2.5, of its text part's."""
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": {**text, "model_type": "kimi_k2"},
        "vision_config": {"vt_hidden_size": 8, "vt_num_hidden_layers": 1},
        "bos_token_id": text.get("bos_token_id"),
        "eos_token_id": text.get("eos_token_id"),
        "ignore_index": -100,
        "media_placeholder_token_id": 2037,
        "tie_word_embeddings": False,
    }
