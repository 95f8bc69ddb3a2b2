"""The rounds of each arm, read from a run of `experiments.runner`: a trial is a round, and its point says which arm."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.reading.tables.frames import TrialFrames
from moonshard.experiments.reading.tables.run_tables import PointOf, RunTables
from moonshard.experiments.studies.sessions import Turn, served_of, turns_of

ArmName = Literal["device", "host", "store", "ssd", "all"]
ARM_NAMES: Sequence[ArmName] = get_args(ArmName)
ARM_OF: Mapping[tuple[str, ...], ArmName] = {
    (): "device",
    ("host",): "host",
    ("store",): "store",
    ("ssd",): "ssd",
    ("host", "store", "ssd"): "all",
}
STORE = "server.kv.store"


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One round of one arm: its turns in the order of sending, and the tokens that came from tiers in all."""

    arm: ArmName
    number: int
    turns: Sequence[Turn]
    tier_tokens: int


def arm_of_points(tables: RunTables) -> dict[int, ArmName]:
    """The arm of each point, by its number. ExperimentError for one that is no arm."""
    return {point.record.number: arm_of(point.record.settings) for point in tables.points()}


def rounds_of(tables: RunTables) -> list[Round]:
    """A round for each trial. ExperimentError for tiers that are no arm, or a workload that cannot be rebuilt."""
    return [_round(tables, point, trial) for point in tables.points() for trial in point.trials]


def arm_of(settings: Mapping[str, object]) -> ArmName:
    """Which tiers a point has: none, one, or all. ExperimentError for two."""
    sizes = {"host": "host_bytes", "store": "dram_bytes", "ssd": "ssd_path"}
    has = {tier: settings[f"{STORE}.{key}"] not in (0, None, "none") for tier, key in sizes.items()}
    there = tuple(tier for tier, is_there in has.items() if is_there and settings[f"{STORE}.enabled"])
    arm = ARM_OF.get(there)
    if arm is None:
        raise ExperimentError(f"{', '.join(there)}: an arm has one tier, or all")
    return arm


def _round(tables: RunTables, point: PointOf, trial: TrialFrames) -> Round:
    served = served_of(tables, point, trial)
    return Round(
        arm=arm_of(point.record.settings),
        number=trial.record.repeat,
        turns=turns_of(point, trial),
        tier_tokens=int(served["tier_tokens"].fill_null(0).sum()),
    )
