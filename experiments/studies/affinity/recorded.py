"""The rounds of each arm, read from a run of `experiments.runner`: a trial is a round, and its point says which arm.

The oracle needs the prompts, which a run does not keep: the workload makes the same ones again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.reading.tables.frames import TrialFrames
from moonshard.experiments.reading.tables.run_tables import PointOf, RunTables
from moonshard.experiments.studies.affinity.rounds import ArmName, Round, Turn
from moonshard.experiments.workload.agents import oracle_cached_tokens
from moonshard.experiments.workload.options import plan, read_workload

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
    computed = _computed(served_of(tables, point, trial), _number(point, "server.prefill.replicas"))
    return Round(
        arm=_arm(point, trial), number=trial.record.repeat, turns=turns_of(point, trial), computed_tokens=computed
    )


def turns_of(point: PointOf, trial: TrialFrames) -> list[Turn]:
    """What a trial's clients saw, beside the oracle. ExperimentError for a workload that cannot be rebuilt."""
    rows = trial.completed.sort("sent_ns")
    oracle = oracle_cached_tokens(
        _prompts(trial, rows["request_index"].to_list()), _number(point, "server.kv.block_size")
    )
    return [_turn(row, tokens) for row, tokens in zip(rows.iter_rows(named=True), oracle, strict=True)]


def served_of(tables: RunTables, point: PointOf, trial: TrialFrames) -> pl.DataFrame:
    """The gateway's rows of a trial."""
    own = (pl.col("run") == point.run.path.name) & (pl.col("point") == point.record.number)
    return tables.server_requests.filter(own, pl.col("repeat") == trial.record.repeat)


def _arm(point: PointOf, trial: TrialFrames) -> ArmName:
    arm = ARM_OF.get(point.record.settings[POLICY])
    if arm is None:
        raise ExperimentError(f"{point.record.label}: its policy is none of {', '.join(map(str, ARM_OF))}")
    thoughts = OF_THOUGHTS.get(trial.record.workload.get("thoughts"))
    if thoughts is not None and arm != "cost":
        raise ExperimentError(f"{point.record.label}: sessions with thoughts are those of the policy cost alone")
    return thoughts or arm


def _prompts(trial: TrialFrames, indices: Sequence[int]) -> list[list[int]]:
    faults: list[str] = []
    options = read_workload(trial.record.workload, faults)
    if options is None:
        raise ExperimentError(*faults)
    requests = plan(options, trial.record.model).requests
    return [requests[index].prompt.tokens() for index in indices]


def _turn(row: Mapping[str, Any], oracle_tokens: int) -> Turn:
    return Turn(
        session=int(row["session"].rpartition(" ")[2]),  # "session 7"
        index=row["turn"],
        sent_s=row["sent_ns"] / 1e9,
        prompt_tokens=row["prompt_tokens"],
        cached_tokens=row["cached_tokens"],
        oracle_tokens=oracle_tokens,
        ttft_ms=row["ttft_ms"],
        handoff_gap_ms=row["handoff_gap_ms"],
    )


def _computed(served: pl.DataFrame, num_workers: int) -> dict[str, float]:
    """Prompt tokens computed by each prefill worker, including those that were never chosen."""
    left = pl.col("prompt_tokens") - pl.col("cached_tokens")
    by_worker = served.drop_nulls("prefill_worker").group_by("prefill_worker").agg(left.sum().alias("tokens"))
    found = {str(worker): float(tokens) for worker, tokens in by_worker.iter_rows()}
    return found | {f"idle {number}": 0.0 for number in range(len(found), num_workers)}


def _number(point: PointOf, key: str) -> int:
    value = point.record.settings[key]
    if not isinstance(value, int):
        raise ExperimentError(f"{point.record.label}: {key} is {value!r}")
    return value
