"""The embedded model's text files with a few random weights: it answers wrongly, but in the right form and at once."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np

from moonshard.experiments.training.export import GENERATION, generation_config, tensors_of
from moonshard.experiments.training.shape import HUGGING_FACE_CONFIG
from moonshard.experiments.training.texts.corpus import POCKET
from moonshard.models.folder.writing import write_checkpoint
from moonshard.models.registry import model_of
from moonshard.models.weights import is_param

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "tiktoken.model", "chat_template.jinja")
SHAPE = HUGGING_FACE_CONFIG | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}


def write_random_pocket(folder: Path, seed: int = 0) -> Path:
    params = model_of(SHAPE).declare()
    random = np.random.default_rng(seed)
    drawn = jax.tree.map(lambda param: random.normal(size=param.shape), params, is_leaf=is_param)
    folder.mkdir(parents=True)
    write_checkpoint(folder, SHAPE, tensors_of(params, drawn))
    (folder / GENERATION).write_text(json.dumps(generation_config(SHAPE)))
    for name in TEXT_FILES:
        shutil.copy(POCKET / name, folder / name)
    return folder
