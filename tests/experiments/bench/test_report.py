"""The benchmark's arithmetic and its table: quantiles, rounds merged, who is how many times faster."""

import pytest

from moonshard.experiments.bench.peers.peer import peers_of
from moonshard.experiments.bench.report import Report, footnotes, markdown, rows, tables
from moonshard.experiments.common.running.measurement import QUICK, Level, Measurement, Plan, Unit, merge

PEER = {
    "ttft_ms": {"128": 30.0, "512": 100.0, "2048": 900.0},
    "itl_ms": {"1": 2.0, "8": 3.0, "16": 4.0},
    "output_tokens_per_s": {"1": 500.0, "8": 2500.0, "16": 4000.0},
}


def measured(name: str, *samples: float, level: Level = "served", unit: Unit = "ms") -> Measurement:
    return Measurement(level=level, name=name, unit=unit, samples=samples)


def a_report(*measurements: Measurement, peer_reports=()) -> Report:
    return Report(
        stamp="2026-01-01T00-00-00Z",
        commit="0123456789ab",
        machine={"cores": 2, "cpu": "a cpu", "memory_gib": 16.0, "load_average_before": 0.1},
        versions={"python": "3.12.1"},
        config={},
        plan=Plan(),
        measurements=measurements,
        peers=peers_of(peer_reports, Plan()),
        peer_engine="transformers" if peer_reports else None,
        peer_reports=peer_reports,
        elapsed_s=1.0,
    )


@pytest.mark.parametrize(("q", "expected"), [(0.0, 1.0), (0.5, 3.0), (0.9, 4.6), (1.0, 5.0)])
def test_a_quantile_lies_between_its_two_nearest_samples(q: float, expected: float):
    assert measured("x", 5, 1, 4, 2, 3).quantile(q) == pytest.approx(expected)


def test_merging_rounds_keeps_every_sample_under_the_first_appearance():
    merged = merge([measured("a", 1), measured("b", 2), measured("a", 3, 4)])
    assert [(one.name, one.samples) for one in merged] == [("a", (1, 3, 4)), ("b", (2,))]


def test_the_same_name_on_another_level_is_another_quantity():
    assert len(merge([measured("a", 1), measured("a", 2, level="device")])) == 2


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (measured("TTFT, 512 prompt tokens, gRPC", 20.0), 5.0),
        (measured("TTFT, 512 prompt tokens, HTTP", 200.0), 0.5),
        (measured("prefill, 2048 tokens", 90.0, level="device"), 10.0),
        (measured("engine step, batch 8", 1.5, level="device"), 2.0),
        (measured("TPOT, batch 16", 8.0), 0.5),
        (measured("output tokens, batch 8", 5000.0, unit="tokens/s"), 2.0),
        (measured("output tokens, batch 1", 250.0, unit="tokens/s"), 0.5),
    ],
)
def test_times_faster_is_above_one_exactly_where_we_are_faster(ours: Measurement, expected: float):
    assert a_report(ours, peer_reports=[PEER]).times_faster(ours) == pytest.approx(expected)


def test_the_peer_is_judged_by_the_median_of_its_rounds_and_by_the_best():
    slow_round = PEER | {"itl_ms": {"1": 200.0, "8": 3.0, "16": 4.0}}
    ours = measured("TPOT, batch 1", 1.0)
    report = a_report(ours, peer_reports=[slow_round, slow_round, PEER])
    assert report.times_faster(ours) == pytest.approx(200.0)
    assert report.times_faster_than_best(ours) == pytest.approx(2.0)


def test_the_best_round_is_the_one_with_most_tokens_per_second():
    slow_round = PEER | {"output_tokens_per_s": {"1": 5.0, "8": 2500.0, "16": 4000.0}}
    ours = measured("output tokens, batch 1", 250.0, unit="tokens/s")
    assert a_report(ours, peer_reports=[PEER, slow_round]).times_faster_than_best(ours) == pytest.approx(0.5)


def test_without_the_peer_its_columns_are_empty_and_a_note_says_why():
    report = a_report(measured("TPOT, batch 1", 1.0, 2.0))
    assert rows(report, "served") == [("TPOT, batch 1", "ms", "1.50", "1.90", "1.99", "1.00 to 2.00", "2", "", "", "")]
    assert any("not installed" in note for note in footnotes(report))


def test_every_level_that_was_measured_has_a_table_with_all_its_rows():
    report = a_report(measured("a", 1), measured("b", 1, level="device"), measured("c", 1, level="device"))
    assert [table.row_count for table in tables(report)] == [2, 1]
    assert markdown(report).count("\n| ") == 3 + 2 * 2


def test_itl_quantiles_of_every_batch_rest_on_500_gaps_or_more():
    for plan in (Plan(), QUICK):
        gaps_per_client = plan.rounds * plan.repeats * (plan.completion_tokens - 1)
        assert gaps_per_client * min(plan.batches) >= 500
