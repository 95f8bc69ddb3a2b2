"""Loads are counted token by token, belong to one checkpoint, and a file of others is refused by its name."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from moonshard.models import moe
from moonshard.models.expert_copies import to_copies
from moonshard.models.expert_loads import PIECE_TOKENS, measure, read_loads, write_loads
from moonshard.models.score import Scorer
from moonshard.models.spec import ModelError
from moonshard.sharding.experts import place_experts
from moonshard.sharding.place import ALONE
from tests.agreement import FIXTURES

pytestmark = pytest.mark.xdist_group("jax")


def test_every_token_counts_once_for_each_expert_it_chose():
    scorer = Scorer(FIXTURES / "kimi_k2")
    tokens = np.random.default_rng(0).integers(0, 2000, PIECE_TOKENS + 5).tolist()
    loads = measure(scorer, tokens)
    assert (loads.sum(axis=1) == len(tokens) * scorer.config.num_experts_per_tok).all()
    rest = scorer.observe(tokens[PIECE_TOKENS:]).experts
    assert rest is not None
    expected = measure(scorer, tokens[:PIECE_TOKENS])
    for layer, chosen in enumerate(rest):
        for expert in chosen.ravel():
            expected[layer, expert] += 1
    assert (loads == expected).all()


def test_copies_of_an_expert_share_its_tokens_and_the_sum_stays():
    loads = np.array([[100.0, 1.0, 1.0, 1.0]])
    placement = place_experts(loads, 6, 1)
    assert placement.num_copies[0].tolist() == [3, 1, 1, 1]
    routing = moe.Routing(weights=jnp.ones((12, 1)), experts=jnp.zeros((12, 1), jnp.int32), margin=jnp.zeros(12))
    given = []

    def note(x, routing, valid, experts, layer):
        given.append(np.asarray(routing.experts))
        return x

    backend = to_copies(note, placement, ALONE)
    empty = moe.Experts(gate_up=jnp.zeros(0), down=jnp.zeros(0))
    backend(jnp.zeros((12, 2)), routing, jnp.ones(12, bool), empty, jnp.int32(0))
    places, counts = np.unique(given[0], return_counts=True)
    assert counts.tolist() == [4, 4, 4]
    assert placement.expert_of[0, places].tolist() == [0, 0, 0]


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
