"""Loads are counted token by token, belong to one checkpoint, and a file of others is refused by its name."""

import json
from pathlib import Path

import numpy as np
import pytest

from moonshard.models.experts.loads import PIECE_TOKENS, measure, read_loads, write_loads
from moonshard.models.score import Scorer
from moonshard.models.spec import ModelError
from tests.agreement import FIXTURES

EXPERTS_PER_TOKEN = 4  # of the fixture
pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]


def test_every_token_counts_once_for_each_expert_it_chose():
    scorer = Scorer(FIXTURES / "kimi_k2")
    tokens = np.random.default_rng(0).integers(0, 2000, PIECE_TOKENS + 5).tolist()
    loads = measure(scorer, tokens)
    assert (loads.sum(axis=1) == len(tokens) * EXPERTS_PER_TOKEN).all()
    rest = scorer.observe(tokens[PIECE_TOKENS:]).experts
    assert rest is not None
    expected = measure(scorer, tokens[:PIECE_TOKENS])
    for layer, chosen in enumerate(rest):
        for expert in chosen.ravel():
            expected[layer, expert] += 1
    assert (loads == expected).all()


def test_loads_come_back_as_they_were_written(tmp_path: Path):
    loads = np.arange(6).reshape(2, 3)
    write_loads(tmp_path / "loads.json", loads, "abc")
    assert (read_loads(tmp_path / "loads.json", "abc", (2, 3)) == loads).all()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a file of expert loads"),
        ("[]", "not a file of expert loads"),
        (json.dumps({"fingerprint": "abc"}), "not a file of expert loads"),
        (json.dumps({"fingerprint": "abc", "loads": [["x"]]}), "not a file of expert loads"),
        (json.dumps({"fingerprint": "other", "loads": [[1, 2]]}), "measured on another checkpoint"),
        (json.dumps({"fingerprint": "abc", "loads": [[1, 2, 3]]}), "expected 1 x 2 loads"),
        (json.dumps({"fingerprint": "abc", "loads": [[1, -2]]}), "expected 1 x 2 loads"),
        (json.dumps({"fingerprint": "abc", "loads": [[1, float("nan")]]}), "expected 1 x 2 loads"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_its_name(tmp_path: Path, text: str, said: str):
    path = tmp_path / "loads.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=said) as refused:
        read_loads(path, "abc", (1, 2))
    assert str(refused.value).startswith(f"{path}: ")


def test_a_file_that_is_not_there_is_refused_by_its_name(tmp_path: Path):
    with pytest.raises(ModelError, match="not a file of expert loads"):
        read_loads(tmp_path / "loads.json", "abc", (1, 2))
