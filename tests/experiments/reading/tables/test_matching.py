"""Runs are compared where they measured the same; every other difference is refused by its name, once."""

from dataclasses import replace

import pytest

from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.reading.tables.matching import Pair, choice, matched, models_differ
from moonshard.experiments.runner.run_record import RunRecord
from tests.experiments.reading.made_up import run_record

RATES = run_record({"workload.rate_per_s": [1.0, 2.0, 4.0]})
MODES = run_record({"server.mode": ["aggregated", "disaggregated"], "workload.rate_per_s": [1.0, 2.0]})


def pairs(a: RunRecord, b: RunRecord, of_a: tuple = (), of_b: tuple = (), despite: tuple = ()) -> list[Pair]:
    return matched(a, b, choice("--a", of_a), choice("--b", of_b), despite)


def numbers(found: list[Pair]) -> list[tuple[int, int]]:
    return [(pair.a.number, pair.b.number) for pair in found]


def test_points_that_set_the_same_belong_together():
    found = pairs(RATES, run_record({"workload.rate_per_s": [4.0, 1.0, 8.0]}))
    assert numbers(found) == [(0, 1), (2, 0)]
    assert [pair.label for pair in found] == ["rate_per_s=1", "rate_per_s=4"]
    assert all(pair.is_paired for pair in found)


def test_two_points_of_one_run_are_compared_by_what_they_are_chosen_by():
    found = pairs(MODES, MODES, ("server.mode=aggregated",), ("server.mode=disaggregated",))
    assert numbers(found) == [(0, 2), (1, 3)]
    assert [pair.label for pair in found] == ["rate_per_s=1", "rate_per_s=2"]


def test_what_a_choice_names_may_differ_between_runs_without_a_sweep():
    other = run_record({}, {"server.mode": "disaggregated"})
    found = pairs(run_record({}), other, ("server.mode=aggregated",), ("server.mode=disaggregated",))
    assert numbers(found) == [(0, 0)]
    assert numbers(pairs(run_record({}), other, despite=("server.mode",))) == [(0, 0)]
    assert numbers(pairs(run_record({}), other, despite=("server",))) == [(0, 0)]


def test_a_table_that_is_named_stands_for_swept_keys_too():
    one, other = (run_record({"server.kv.transport": [name]}) for name in ("mooncake", "grpc"))
    assert numbers(pairs(one, other, despite=("server.kv",))) == [(0, 0)]


def test_other_requests_are_not_paired():
    found = pairs(RATES, RATES, ("workload.rate_per_s=1",), ("workload.rate_per_s=2",))
    assert [(pair.label, pair.is_paired) for pair in found] == [("as configured", False)]


def test_where_a_server_listens_is_no_difference():
    assert pairs(run_record({}), run_record({}, {"server.gateway.port": 1}, load_average_before=3.0))


@pytest.mark.parametrize(
    ("b", "said"),
    [
        (run_record({}, {"workload.kind": "trace"}), "workload.kind is 'fixed' in A and 'trace' in B"),
        (run_record({}, {"server.decode.max_slots": 8}), "server.decode.max_slots is 4 in A and 8 in B"),
        (run_record({}, {"workload.new": 1}), "workload.new is None in A and 1 in B"),
        (run_record({}, {"slo.ttft_ms": 1.0}), "slo.ttft_ms is 500.0 in A and 1.0 in B"),
        (run_record({}, {"client.temperature": 1.0}), "client.temperature is None in A and 1.0 in B"),
        (run_record({}, {"workload.digest": "d"}), "workload.digest is None in A and 'd' in B"),
        (run_record({}, cpu="other"), "machine.cpu is one in A and other in B"),
        (replace(run_record({}), url="a:1"), "url is None in A and 'a:1' in B"),
    ],
)
def test_an_undeclared_difference_is_refused_by_its_name(b: RunRecord, said: str):
    with pytest.raises(ExperimentError) as refused:
        pairs(run_record({}), b)
    assert refused.value.faults[:-1] == (said,)
    assert "--despite" in refused.value.faults[-1]
    key = said.partition(" ")[0]
    assert pairs(run_record({}), b, despite=(key,))


def test_a_difference_of_all_points_is_named_once():
    with pytest.raises(ExperimentError) as refused:
        pairs(RATES, run_record({"workload.rate_per_s": [1.0, 2.0]}, {"server.mode": "disaggregated"}))
    assert len(refused.value.faults) == 2


@pytest.mark.parametrize(
    ("b", "of_a", "said"),
    [
        (RATES, ("server.mod=x",), "--a server.mod: unknown key; did you mean server.mode?"),
        (RATES, ("server.mode=x",), "--a server.mode=x: x has no such point"),
        (RATES, ("server.mode",), "--a server.mode: expected key=value"),
        (run_record({"workload.rate_per_s": [8.0]}), (), "no point in common"),
    ],
)
def test_choices_that_choose_nothing_are_refused(b: RunRecord, of_a: tuple, said: str):
    with pytest.raises(ExperimentError, match=said.replace("?", r"\?")):
        pairs(RATES, b, of_a)


@pytest.mark.parametrize("key", ["server.mod", "serve", "model.finger", "machine.cpus"])
def test_a_declared_key_that_neither_run_has_is_refused_by_its_name(key: str):
    with pytest.raises(ExperimentError, match=f"--despite {key}: unknown key"):
        pairs(run_record({}), run_record({}), despite=(key,))
    assert pairs(run_record({}), run_record({}), despite=("server", "model", "machine.cpu", "url"))


def test_a_load_that_is_told_by_a_capacity_is_another_one_in_each_run():
    one = run_record({}, {"workload.kind": "relative", "workload.times_capacity": 3.0})
    (found,) = pairs(one, one)
    assert not found.is_paired


def test_points_that_are_alike_but_for_what_was_declared_need_a_choice():
    with pytest.raises(ExperimentError, match=r"--a: x has .* choose one with --a KEY=VALUE"):
        pairs(MODES, MODES, despite=("server.mode",))


def test_other_weights_under_the_same_path_are_another_model():
    a = {"fingerprint": "a", "dtype": "float32", "vocab_size": 9, "max_context_tokens": 8}
    assert models_differ(a, a, ()) == []
    assert models_differ(a, a | {"fingerprint": "b"}, ()) == ["model.fingerprint is 'a' in A and 'b' in B"]
    assert models_differ(a, a | {"fingerprint": "b"}, ("model",)) == []


@pytest.mark.parametrize(
    ("declared", "num_left"),
    [
        ("server", 0),
        ("server.model", 0),
        ("server.model.path", 0),
        ("server.model.max_context_tokens", 1),
        ("server.model.name", 2),
    ],
)
def test_only_what_decides_the_weights_declares_other_weights(declared: str, num_left: int):
    a = {"fingerprint": "a", "dtype": "float32", "vocab_size": 9, "max_context_tokens": 8}
    assert len(models_differ(a, a | {"fingerprint": "b", "max_context_tokens": 9}, (declared,))) == num_left


def test_requests_of_servers_that_keep_their_caches_are_not_paired():
    (found,) = pairs(replace(run_record({}), url="a:1"), replace(run_record({}), url="a:1"))
    assert not found.is_paired


def test_the_same_file_may_lie_elsewhere():
    here, there = (dict[str, object]({"workload.path": place, "workload.digest": "d"}) for place in ("/a", "/b"))
    (found,) = pairs(run_record({}, here), run_record({}, there))
    assert found.is_paired
    with pytest.raises(ExperimentError, match=r"workload\.digest is 'd' in A and 'e' in B"):
        pairs(run_record({}, here), run_record({}, there | {"workload.digest": "e"}))
