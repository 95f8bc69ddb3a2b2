"""What the rounds of the arms come to, beside the bars, and as a table. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from moonshard.experiments.common.grid import Grid, number, verdict
from moonshard.experiments.studies.sessions import TurnFigures, turn_figures
from moonshard.experiments.studies.tiers.recorded import ARM_NAMES, ArmName, Round

MAX_POINTS_BELOW_ORACLE = 3.0
MIN_TIMES_FASTER = 3.0
COLUMNS = (
    "arm",
    "turns",
    "found again",
    "from tiers",
    "points below the oracle",
    "TTFT p50 of first turns, ms",
    "TTFT p50 of later turns, ms",
    "p90, ms",
    "`device` / this",
)


@dataclass(frozen=True, kw_only=True)
class ArmFigures(TurnFigures):
    """Over all rounds."""

    arm: ArmName
    tier_rate: float  # what came from tiers, a part of `hit_rate`


def figures(arm: ArmName, rounds: Sequence[Round]) -> ArmFigures:
    """The figures of one arm over its rounds; ValueError where there are none."""
    own = [one for one in rounds if one.arm == arm]
    if not own:
        raise ValueError(f"no round of arm {arm}")
    turns = [turn for one in own for turn in one.turns]
    tier_rate = sum(one.tier_tokens for one in own) / sum(turn.prompt_tokens for turn in turns)
    return ArmFigures(arm=arm, tier_rate=tier_rate, **asdict(turn_figures(turns)))


def grid_of(rounds: Sequence[Round]) -> Grid:
    """A row for each arm that was run, and the bars of those with files."""
    run = {one.arm for one in rounds}
    by_arm = {arm: figures(arm, rounds) for arm in ARM_NAMES if arm in run}
    base = by_arm["device"].later_ttft_p50_ms
    rows = tuple(_row(found, base / found.later_ttft_p50_ms) for found in by_arm.values())
    notes = tuple(_bars(by_arm[arm], base) for arm in ("ssd", "all") if arm in by_arm)
    return Grid(title="Agents' sessions, by what is below the device's pages", columns=COLUMNS, rows=rows, notes=notes)


def _bars(found: ArmFigures, base_ms: float) -> str:
    bars = {
        f"within {MAX_POINTS_BELOW_ORACLE:g} points of the oracle": found.points_below_oracle
        <= MAX_POINTS_BELOW_ORACLE,
        f"TTFT p50 of later turns {MIN_TIMES_FASTER:g} times lower than `device`": base_ms / found.later_ttft_p50_ms
        >= MIN_TIMES_FASTER,
    }
    return f"Bars of `{found.arm}`: " + ", ".join(f"{what}: {verdict(is_held)}" for what, is_held in bars.items()) + "."


def _row(found: ArmFigures, times_faster: float) -> tuple[str, ...]:
    return (
        f"`{found.arm}`",
        f"{found.num_turns:,}",
        f"{found.hit_rate:.1%}",
        f"{found.tier_rate:.1%}",
        f"{found.points_below_oracle:.1f}",
        number(found.first_ttft_p50_ms),
        number(found.later_ttft_p50_ms),
        number(found.later_ttft_p90_ms),
        f"{times_faster:.2f}",
    )
