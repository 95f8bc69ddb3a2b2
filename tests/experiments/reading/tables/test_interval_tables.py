"""Tables by point: percentiles and rates lie in their intervals, which are Student's t over repeats."""

from pathlib import Path

import polars as pl
import pytest

from moonshard.experiments.common.intervals import ratio_interval
from moonshard.experiments.reading.summary import Rate
from moonshard.experiments.reading.tables.interval_tables import (
    median_table,
    offered_table,
    percentile_table,
    rate_table,
    trial_rates,
)
from moonshard.experiments.reading.tables.run_tables import RunTables, load_runs
from tests.experiments.reading.made_up import made_up_run


def test_percentiles_by_point_lie_in_their_intervals(tables: RunTables):
    found = percentile_table(tables, "ttft")
    medians = found.filter(percentile="p50").sort("point")
    assert medians["ms"].to_list() == pytest.approx([2, 12])
    assert (medians["low"] <= medians["ms"]).all()
    assert (medians["ms"] <= medians["high"]).all()
    assert set(found["num_requests"]) == {6}
    assert percentile_table(tables, "ttft", {"p50": 0.5}, where=pl.col("request_index") < 2)["ms"].to_list() == (
        pytest.approx([1, 11])
    )


def test_a_run_without_tokens_has_no_percentiles_of_gaps(tmp_path: Path):
    assert percentile_table(load_runs(made_up_run(tmp_path, has_tokens=False)), "itl").is_empty()


def test_each_run_has_its_own_rows(run: Path, tmp_path: Path):
    both = load_runs(run, made_up_run(tmp_path, "other"))
    assert percentile_table(both, "ttft").select("run", "point").unique().height == 4


@pytest.mark.parametrize(
    ("rate", "expected"),
    [("requests/s", [3 / 2, 3 / 2]), ("SLO attainment", [1 / 4, 0]), ("output tokens/s", [9 / 2, 9 / 2])],
)
def test_rates_are_means_of_repeats(tables: RunTables, rate: Rate, expected: list[float]):
    found = rate_table(tables, rate)
    assert found["value"].to_list() == found["low"].to_list() == found["high"].to_list() == expected
    assert set(found["num_repeats"]) == {2}
    assert set(found["rate"]) == {rate}
    trials = trial_rates(tables, rate)
    assert trials.select("point", "repeat").rows() == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert trials.group_by("point").agg(pl.col("value").mean()).sort("point")["value"].to_list() == expected


def test_what_was_offered_is_by_point_and_nothing_of_closed_loops(tables: RunTables):
    assert offered_table(tables).select("point", "offered_per_s").rows() == [(0, 10.0), (1, 10.0)]


def test_medians_of_repeats_have_an_interval_by_group():
    rows = [("a", repeat, ms) for repeat, by_repeat in enumerate(([1, 2, 9], [4], [6])) for ms in by_repeat]
    frame = pl.DataFrame([*rows, ("b", 0, 5), ("b", 1, None)], schema=["name", "repeat", "ms"], orient="row")
    a, b = median_table(frame, ["name"], "ms").rows(named=True)
    assert (a["name"], a["ms"], a["num_repeats"]) == ("a", 4.0, 3)
    assert a["high"] - a["ms"] == pytest.approx(4.3027 * 2 / 3**0.5)
    assert (b["ms"], b["low"], b["num_repeats"]) == (5.0, None, 1)
    assert median_table(frame, ["name"], "ms", ratio_interval)["ms"].to_list() == pytest.approx([48 ** (1 / 3), 5.0])
