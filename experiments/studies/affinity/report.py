"""The arms side by side as a table, and the bars of `cost`."""

from collections.abc import Sequence

from moonshard.experiments.common.grid import Grid, number, verdict
from moonshard.experiments.studies.affinity.figures import (
    MAX_LOAD,
    MAX_POINTS_BELOW_ORACLE,
    MIN_TIMES_FASTER,
    ArmFigures,
    figures,
)
from moonshard.experiments.studies.affinity.rounds import ARM_NAMES, THOUGHT_ARMS, Round

COLUMNS = (
    "arm",
    "turns",
    "found again",
    "points below the oracle",
    "load, max / mean, worst round",
    "TTFT p50 of first turns, ms",
    "TTFT p50 of later turns, ms",
    "p90, ms",
    "`random` / this",
    "handoff gap p50, ms",
)

THOUGHT_COLUMNS = (
    "arm",
    "turns",
    "prompt tokens a turn",
    "prefilled a turn",
    "found again",
    "points below the oracle",
    "TTFT p50 of later turns, ms",
    "p90, ms",
)


def grid_of(rounds: Sequence[Round]) -> Grid:
    """A row for each arm, and the bars of `cost`."""
    by_arm = {arm: figures(arm, rounds) for arm in ARM_NAMES}
    base = by_arm["random"].later_ttft_p50_ms
    rows = tuple(_row(found, base / found.later_ttft_p50_ms) for found in by_arm.values())
    cost = by_arm["cost"]
    bars = (
        (
            f"within {MAX_POINTS_BELOW_ORACLE:g} points of the oracle",
            cost.points_below_oracle <= MAX_POINTS_BELOW_ORACLE,
        ),
        (f"load at most {MAX_LOAD:g}", cost.load_max_over_mean <= MAX_LOAD),
        (f"TTFT {MIN_TIMES_FASTER:g} times lower than `random`", base / cost.later_ttft_p50_ms >= MIN_TIMES_FASTER),
    )
    notes = ("Bars of `cost`: " + ", ".join(f"{what}: {verdict(is_held)}" for what, is_held in bars) + ".",)
    return Grid(title="Agents' sessions, three prefill workers", columns=COLUMNS, rows=rows, notes=notes)


def thoughts_grid_of(rounds: Sequence[Round]) -> Grid:
    """The arms of thinking sessions side by side, of those that were run."""
    run = {one.arm for one in rounds}
    rows = tuple(_thoughts_row(figures(arm, rounds)) for arm in THOUGHT_ARMS if arm in run)
    return Grid(title="Thoughts of earlier turns", columns=THOUGHT_COLUMNS, rows=rows)


def _thoughts_row(found: ArmFigures) -> tuple[str, ...]:
    return (
        f"`{found.arm}`",
        f"{found.num_turns:,}",
        number(found.prompt_tokens_per_turn),
        number(found.computed_tokens_per_turn),
        f"{found.hit_rate:.1%}",
        f"{found.points_below_oracle:.1f}",
        number(found.later_ttft_p50_ms),
        number(found.later_ttft_p90_ms),
    )


def _row(found: ArmFigures, times_faster: float) -> tuple[str, ...]:
    return (
        f"`{found.arm}`",
        f"{found.num_turns:,}",
        f"{found.hit_rate:.1%}",
        f"{found.points_below_oracle:.1f}",
        f"{found.load_max_over_mean:.2f}",
        number(found.first_ttft_p50_ms),
        number(found.later_ttft_p50_ms),
        number(found.later_ttft_p90_ms),
        f"{times_faster:.2f}",
        number(found.handoff_gap_p50_ms),
    )
