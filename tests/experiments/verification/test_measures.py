"""The figures against their definitions, counted out over random tables."""

from random import Random

import pytest

from moonshard.experiments.verification.measures import Row, finished, triggering
from moonshard.experiments.verification.results import FAILED, SUCCESS, Result

REASONS = ["tool_calls", "stop", "length"]


def row(reason: str | None, reference: str | None = None, valid: bool = True, *, is_asked: bool = True) -> Row:
    """The row of a result; without a reason it failed."""
    result = Result(
        data_index=1,
        request={} if is_asked else None,
        extra_body={},
        response={},
        status=FAILED if reason is None else SUCCESS,
        finish_reason=reason,
        tool_calls_valid=valid if reason == "tool_calls" else None,
        last_run_at="",
        duration_ms=0,
        hash="x",
    )
    return Row(result=result, reference=reference)


def harmonic(a: float, b: float) -> float:
    return 2 / (1 / a + 1 / b)


@pytest.mark.parametrize("seed", range(50))
def test_measures_are_their_definitions(seed):
    random = Random(seed)
    asked = [
        (random.choice([*REASONS, None]), random.choice([*REASONS, None]), random.random() < 0.7)
        for _ in range(random.randrange(1, 60))
    ]
    rows = [row(*each) for each in asked]
    compared = [(mine == "tool_calls", theirs == "tool_calls") for mine, theirs, _ in asked if theirs is not None]
    positives, found, ended = compared.count((True, True)), triggering(rows), finished(rows)
    mine, theirs = sum(a for a, _ in compared), sum(b for _, b in compared)
    assert found.num == len(compared)
    assert found.precision == (positives / mine if mine else None)
    assert found.recall == (positives / theirs if theirs else None)
    if positives:
        assert found.f1 == pytest.approx(harmonic(positives / mine, positives / theirs))
    else:
        assert found.f1 == (0 if mine or theirs else None)
    calls = [valid for reason, _, valid in asked if reason == "tool_calls"]
    assert ended.schema_accuracy == (calls.count(True) / len(calls) if calls else None)
    assert ended.num_failed == [reason for reason, *_ in asked].count(None)
    assert ended.num_succeeded == sum(ended.reasons.values()) == len(asked) - ended.num_failed


def test_nothing_to_measure_by_is_none_and_nothing_in_common_is_0():
    assert (triggering([]).f1, finished([]).schema_accuracy) == (None, None)
    without = triggering([row("tool_calls"), row("stop")])
    assert (without.num, without.precision, without.recall, without.f1) == (0, None, None, None)
    apart = triggering([row("tool_calls", "stop"), row("stop", "tool_calls")])
    assert (apart.precision, apart.recall, apart.f1) == (0, 0, 0)


def test_a_request_that_failed_did_not_call_and_a_line_that_was_not_asked_is_in_no_table():
    failed = triggering([row("tool_calls", "tool_calls"), row(None, "tool_calls")])
    assert (failed.precision, failed.recall) == (1, 0.5)
    unasked = triggering([row("tool_calls", "tool_calls"), row(None, "tool_calls", is_asked=False)])
    assert (unasked.num, unasked.recall) == (1, 1)
