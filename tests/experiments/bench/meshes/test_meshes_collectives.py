"""A worker's own programs, compiled: a layer needs as many collectives as its parallel form asks for, and no more."""

from collections import Counter

import jaxtyping
import pytest

from moonshard.experiments.bench.meshes.collectives import by_place, step_program
from moonshard.experiments.bench.meshes.hlo import LoopTurn
from moonshard.experiments.bench.meshes.tables import CASES
from moonshard.serving.config.reading import load_config
from tests.agreement import FIXTURES

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.timeout(900)]
CONFIG = load_config(None, [f"model.path={FIXTURES / 'kimi_k2'}", "decode.max_slots=4", "prefill.chunk_tokens=64"])
BY_NAME = {case.name: case for case in CASES}
LAYER_SCOPES = frozenset({"while/body/attention/dot", "while/body/feed_forward/dot"})


@pytest.fixture(autouse=True)
def shapes_for_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowering works on trees of shapes, which the checks of annotations would refuse."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def test_a_decode_step_of_tensor_parallelism_needs_two_all_reduces_a_layer():
    counts = step_program(CONFIG, BY_NAME["tensor 2"], "decode").count()
    assert counts["a dense layer"] == counts["a sparse layer"] == Counter({"all-reduce": 2})
    assert counts["a round of the exchange"] == Counter()
    assert counts["outside"] == Counter({"all-reduce": 1, "all-gather": 1})  # embeddings, logits


@pytest.mark.slow
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_an_exchange_of_tokens_is_the_rounds_and_a_dense_layer_has_none(role: str):
    counts = step_program(CONFIG, BY_NAME["expert 4"], role).count()
    assert counts["a dense layer"] == Counter()
    assert counts["a sparse layer"] == Counter({"all-reduce": 1})  # how many rounds
    assert set(counts["a round of the exchange"]) == {"all-to-all"}
    assert counts["outside"] == Counter()


@pytest.mark.slow
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_stages_of_one_device_need_no_collective(role: str):
    counts = step_program(CONFIG, BY_NAME["pipe 2"], role).count()
    assert set(map(sum, (each.values() for each in counts.values()))) == {0}


def turn(counts: Counter[str], *loops: LoopTurn, op_names: frozenset[str] = frozenset()) -> LoopTurn:
    return LoopTurn(counts=counts, op_names=op_names, loops=loops)


def test_what_runs_in_a_loop_that_is_no_layer_is_outside():
    rounds = turn(Counter({"all-to-all": 4}))
    layers = turn(Counter({"all-reduce": 1}), rounds, op_names=LAYER_SCOPES)
    hoisted = turn(Counter({"all-gather": 1}), op_names=frozenset({"while/body/attention/gather"}))
    found = by_place(turn(Counter({"all-reduce": 2}), hoisted, layers), ["a sparse layer"])
    assert found == {
        "a dense layer": Counter(),
        "a sparse layer": Counter({"all-reduce": 1}),
        "a round of the exchange": Counter({"all-to-all": 4}),
        "outside": Counter({"all-reduce": 2, "all-gather": 1}),
    }


def test_layers_that_are_not_found_are_no_zeros():
    with pytest.raises(ValueError, match="0 loops over layers in a program of 2 stacks"):
        by_place(turn(Counter({"all-reduce": 4})), ["a dense layer", "a sparse layer"])
