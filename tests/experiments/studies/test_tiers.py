"""The figures of the tiers study, and which of its points is which arm."""

import pytest

from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.studies.sessions import Turn
from moonshard.experiments.studies.tiers.figures import figures, grid_of
from moonshard.experiments.studies.tiers.recorded import ArmName, Round, arm_of


def a_round(arm: ArmName, later_ttft_ms: float, cached: int, tier_tokens: int) -> Round:
    first = Turn(session=0, index=0, sent_s=0.0, prompt_tokens=100, cached_tokens=0, ttft_ms=50.0)
    later = Turn(
        session=0,
        index=1,
        sent_s=1.0,
        prompt_tokens=300,
        cached_tokens=cached,
        oracle_tokens=96,
        ttft_ms=later_ttft_ms,
    )
    return Round(arm=arm, number=0, turns=[first, later], tier_tokens=tier_tokens)


def test_figures_are_shares_of_tokens_and_medians_of_turns():
    found = figures("ssd", [a_round("ssd", 20.0, 92, 60), a_round("device", 90.0, 0, 0)])
    assert (found.hit_rate, found.tier_rate, found.oracle_hit_rate) == (92 / 400, 60 / 400, 96 / 400)
    assert found.points_below_oracle == pytest.approx(1.0)
    assert (found.first_ttft_p50_ms, found.later_ttft_p50_ms) == (50.0, 20.0)


@pytest.mark.parametrize(("later_ms", "cached", "held"), [(30.0, 84, 2), (31.0, 84, 1), (31.0, 83, 0)])
def test_the_bars_are_held_and_missed_by_name(later_ms: float, cached: int, held: int):
    grid = grid_of([a_round("device", 90.0, 0, 0), a_round("ssd", later_ms, cached, 10)])
    assert [row[0] for row in grid.rows] == ["`device`", "`ssd`"]
    (note,) = grid.notes
    assert (note.count(": held"), note.count(": missed")) == (held, 2 - held)


@pytest.mark.parametrize(
    ("host_bytes", "dram_bytes", "ssd_path", "expected"),
    [
        (1, 0, "none", "host"),
        (0, 1, "none", "store"),
        (0, 0, "results", "ssd"),
        (1, 1, "results", "all"),
    ],
)
def test_an_arm_is_the_tiers_that_are_there(host_bytes: int, dram_bytes: int, ssd_path: str, expected: ArmName):
    assert arm_of(settings(True, host_bytes, dram_bytes, ssd_path)) == expected
    assert arm_of(settings(False, host_bytes, dram_bytes, ssd_path)) == "device"


def test_two_tiers_are_no_arm():
    with pytest.raises(ExperimentError, match="host, ssd: an arm has one tier, or all"):
        arm_of(settings(True, 1, 0, "results"))


def settings(is_enabled: bool, host_bytes: int, dram_bytes: int, ssd_path: str) -> dict[str, object]:
    values = {"enabled": is_enabled, "host_bytes": host_bytes, "dram_bytes": dram_bytes, "ssd_path": ssd_path}
    return {f"server.kv.store.{key}": value for key, value in values.items()}


def test_an_arm_without_a_round_has_no_figures():
    with pytest.raises(ValueError, match="no round of arm host"):
        figures("host", [a_round("ssd", 20.0, 92, 60)])
