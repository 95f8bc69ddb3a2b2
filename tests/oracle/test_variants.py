"""Architectures that the committed fixtures do not show, against Hugging Face transformers in .venv-oracle."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from moonshard.models.score import score

ROOT = Path(__file__).parents[2]
ORACLE_PYTHON = ROOT / ".venv-oracle/bin/python"
VARIANTS = json.loads((ROOT / "tests/oracle/variants.json").read_text())
MAX_LOGIT_ERROR = 2e-4

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.xdist_group("oracle"),  # the folders are built once
    pytest.mark.skipif(not ORACLE_PYTHON.exists(), reason="no .venv-oracle: `make oracle` makes it"),
]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built variants, a folder each."""
    out = tmp_path_factory.mktemp("variants")
    command = [ORACLE_PYTHON, "-m", "tests.oracle.variants", out]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return out


@pytest.mark.parametrize("name", VARIANTS)
def test_float32_logits_and_greedy_tokens_equal_transformers(folders, name):
    reference = np.load(folders / name / "ref.npz")
    prompt, greedy = reference["prompt"].tolist(), reference["greedy"].tolist()
    logits = score(folders / name, [*prompt, *greedy], "float32")
    assert np.abs(logits - reference["logits"]).max() < MAX_LOGIT_ERROR
    assert logits[len(prompt) - 1 : -1].argmax(axis=-1).tolist() == greedy
