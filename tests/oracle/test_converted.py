"""Folders that `moonshard convert` wrote are read by Hugging Face transformers, and have the values that it serves."""

import subprocess
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from moonshard.experiments.bench.peers.proportions import CONFIG, shapes
from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.folder.conversion import Target, convert
from moonshard.models.folder.writing import write_checkpoint
from moonshard.models.formats.stored import Reader
from moonshard.models.score import score

ROOT = Path(__file__).parents[2]
ORACLE_PYTHON = ROOT / ".venv-oracle/bin/python"
MAX_LOGIT_ERROR = 2e-4
TOKENS = list(range(3, 40))
SMALL = {  # no block of 128 is ragged: of those transformers takes the size from their number
    **CONFIG,
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_attention_heads": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.xdist_group("oracle"),
    pytest.mark.skipif(not ORACLE_PYTHON.exists(), reason="no .venv-oracle: `make oracle` makes it"),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model in bfloat16."""
    folder, random = tmp_path_factory.mktemp("plain"), np.random.default_rng(0)
    tensors = {}
    for name, shape in shapes(SMALL):
        if name.endswith("e_score_correction_bias"):
            tensors[name] = np.zeros(shape, np.float32)
        elif len(shape) == 1:
            tensors[name] = np.ones(shape, ml_dtypes.bfloat16)
        else:
            drawn = random.standard_normal(shape, np.float32) * np.float32(1.2 * shape[-1] ** -0.5)
            tensors[name] = drawn.astype(ml_dtypes.bfloat16)
    write_checkpoint(folder, SMALL, tensors)
    return folder


def read_by_transformers(folder: Path) -> dict[str, np.ndarray]:
    out = folder / "read.npz"
    command = [ORACLE_PYTHON, "-m", "tests.oracle.read_folder", folder, out, *map(str, TOKENS)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return dict(np.load(out))


def served_experts(folder: Path) -> dict[str, np.ndarray]:
    reader, width, d = Reader(Checkpoint.open(folder)), SMALL["moe_intermediate_size"], SMALL["hidden_size"]

    def matrix(shape: tuple[int, int], which: str, expert: int) -> np.ndarray:
        return reader.array(f"model.layers.1.mlp.experts.{expert}.{which}_proj.weight", shape).astype(np.float32)

    in_, out = partial(matrix, (width, d)), partial(matrix, (d, width))
    return {
        "gate_up": np.stack([np.concatenate([in_("gate", expert), in_("up", expert)]) for expert in range(2)]),
        "down": np.stack([out("down", expert) for expert in range(2)]),
    }


@pytest.mark.parametrize("to", ["int4", "fp8"])
def test_transformers_reads_a_quantised_folder_s_values_and_computes_what_is_served(
    plain: Path, tmp_path: Path, to: Target
):
    convert(plain, to, tmp_path / "quantised")
    convert(tmp_path / "quantised", "bf16", tmp_path / "widened")
    read = read_by_transformers(tmp_path / "quantised")
    for name, values in served_experts(tmp_path / "quantised").items():
        np.testing.assert_array_equal(read[name], values)
    logits = score(tmp_path / "widened", TOKENS, "float32")
    assert np.abs(logits - read_by_transformers(tmp_path / "widened")["logits"]).max() < MAX_LOGIT_ERROR
    if to == "int4":  # whose values bfloat16 has exactly
        assert np.abs(logits - score(tmp_path / "quantised", TOKENS, "float32")).max() < MAX_LOGIT_ERROR
