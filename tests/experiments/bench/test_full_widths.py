"""The folder with Kimi K2's true widths has the real experts' bytes, and in small is one that a worker would load."""

from pathlib import Path

import numpy as np

from moonshard.experiments.bench.peers import full_widths
from moonshard.models import weights
from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.registry import open_model

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_attention_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
}


def test_an_expert_has_the_bytes_of_kimi_k2_5_s():
    text = full_widths.config_of(8)["text_config"]
    own = [piece for piece in full_widths.pieces(text) if any(".layers.1.mlp.experts.3." in n for n in piece.tensors)]
    assert len(own) == 3
    assert sum(piece.num_bytes for piece in own) == (3 * 2048 * 7168) * (4 + 16 / 32) / 8 + 3 * 8


def test_in_small_it_is_a_whole_folder_and_the_same_each_time(tmp_path: Path):
    for name in "ab":
        full_widths.write(tmp_path / name, 8, **SMALL)
    checkpoint, model = open_model(tmp_path / "a")
    assert (model.config.num_hidden_layers, model.config.num_moe_layers) == (3, 2)
    weights.check_shapes(model.declare(), checkpoint)
    assert Checkpoint.open(tmp_path / "a").fingerprint == Checkpoint.open(tmp_path / "b").fingerprint
    codes = checkpoint.tensor("model.layers.2.mlp.experts.7.down_proj.weight_packed")
    assert len(np.unique(codes)) > 0.9 * codes.size
