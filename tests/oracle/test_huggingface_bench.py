"""The yardstick itself runs: a number for every prompt length and batch that was asked for."""

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ORACLE_PYTHON = ROOT / ".venv-oracle/bin/python"
BENCH = ROOT / "experiments/bench/peers/huggingface.py"
SIZES = (
    *("--prompt-tokens", "8", "20", "--batch", "1", "3", "--context-tokens", "8"),
    *("--threads", "1", "--decode-steps", "2", "--repeats", "1"),
)

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.xdist_group("oracle"),
    pytest.mark.skipif(not ORACLE_PYTHON.exists(), reason="no .venv-oracle: `make oracle` makes it"),
]


@pytest.mark.parametrize("folder", ["kimi_k2", "dsv3_groups"])
def test_every_prompt_length_and_batch_gets_a_positive_number(folder):
    command = [ORACLE_PYTHON, BENCH, ROOT / "tests/fixtures" / folder, *SIZES]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["threads"] == 1
    for table, keys in {"ttft_ms": ["8", "20"], "itl_ms": ["1", "3"], "output_tokens_per_s": ["1", "3"]}.items():
        assert list(report[table]) == keys
        assert all(value > 0 for value in report[table].values())
