"""The rounds of each arm, read from a run of `experiments.runner`: a trial is a round, and its point says which arm."""

from collections.abc import Mapping

import polars as pl

from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.reading.tables.frames import TrialFrames
from moonshard.experiments.reading.tables.run_tables import PointOf, RunTables
from moonshard.experiments.studies.affinity.rounds import ArmName, Round
from moonshard.experiments.studies.sessions import served_of, turns_of, whole_number

POLICY = "server.routing.policy"
OF_THOUGHTS: Mapping[object, ArmName] = {"dropped": "dropped", "kept": "kept"}
ARM_OF: Mapping[object, ArmName] = {"random": "random", "affinity": "header", "cost": "cost"}


def arm_of_points(tables: RunTables) -> dict[int, ArmName]:
    """The arm of each point, by its number."""
    return {point.record.number: _arm(point, trial) for point in tables.points() for trial in point.trials}


def rounds_of(tables: RunTables) -> list[Round]:
    """A round for each trial. ExperimentError for a policy that is no arm, or a workload that cannot be rebuilt."""
    return [_round(tables, point, trial) for point in tables.points() for trial in point.trials]


def _round(tables: RunTables, point: PointOf, trial: TrialFrames) -> Round:
    computed = _computed(served_of(tables, point, trial), whole_number(point, "server.prefill.replicas"))
    return Round(
        arm=_arm(point, trial), number=trial.record.repeat, turns=turns_of(point, trial), computed_tokens=computed
    )


def _arm(point: PointOf, trial: TrialFrames) -> ArmName:
    arm = ARM_OF.get(point.record.settings[POLICY])
    if arm is None:
        raise ExperimentError(f"{point.record.label}: its policy is none of {', '.join(map(str, ARM_OF))}")
    thoughts = OF_THOUGHTS.get(trial.record.workload.get("thoughts"))
    if thoughts is not None and arm != "cost":
        raise ExperimentError(f"{point.record.label}: sessions with thoughts are those of the policy cost alone")
    return thoughts or arm


def _computed(served: pl.DataFrame, num_workers: int) -> dict[str, float]:
    """Prompt tokens computed by each prefill worker, including those that were never chosen."""
    left = pl.col("prompt_tokens") - pl.col("cached_tokens")
    by_worker = served.drop_nulls("prefill_worker").group_by("prefill_worker").agg(left.sum().alias("tokens"))
    found = {str(worker): float(tokens) for worker, tokens in by_worker.iter_rows()}
    return found | {f"idle {number}": 0.0 for number in range(len(found), num_workers)}
