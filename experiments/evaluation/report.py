"""The table and the JSON of an evaluation.

In the JSON the rows stand at the top, each a share of 1, or null where nothing was asked; everything else is under
`details`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from moonshard.experiments.evaluation.figures import Share, depth_shares, errors, row_shares, side_shares
from moonshard.experiments.evaluation.interview import InterviewOutcome
from moonshard.experiments.evaluation.replies import Identity
from moonshard.experiments.training.texts.tools.tasks import NUM_DEPTHS


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What was asked of whom, and how it went."""

    identity: Identity
    seed: int
    num: int
    outcomes: Sequence[InterviewOutcome]
    seconds: Mapping[str, float]  # of each set of questions
    router_load: Sequence[float] | None
    is_interrupted: bool = False


def to_json(evaluation: Evaluation) -> dict[str, Any]:
    shares = row_shares(evaluation.outcomes)
    num_errors, messages = errors(evaluation.outcomes)
    details = {
        **asdict(evaluation.identity),
        "seed": evaluation.seed,
        "num": evaluation.num,
        "is_interrupted": evaluation.is_interrupted,
        "rows": {row: _counts(share) for row, share in shares.items()},
        "beside": {name: _counts(share) for name, share in side_shares(evaluation.outcomes).items()},
        "recall_by_depth": depth_shares(evaluation.outcomes),
        "errors": {"num_questions": num_errors, "messages": messages},
        "router_load": None if evaluation.router_load is None else list(evaluation.router_load),
        "seconds": dict(evaluation.seconds),
    }
    return {row: share.value for row, share in shares.items()} | {"details": details}


def _counts(share: Share) -> dict[str, Any]:
    low, high = share.interval()
    return {"share": share.value, "num_right": share.num_right, "num": share.num, "interval_95": [low, high]}


def table(evaluation: Evaluation) -> Table:
    """The rows as text; rows without a question are left out."""
    found = Table("row", "right", "of", "share", "95 % interval", title="Held-out questions", title_justify="left")
    rows, beside = row_shares(evaluation.outcomes), side_shares(evaluation.outcomes)
    for name, share in rows.items():
        _add(found, name, share)
    found.add_section()
    for name, share in beside.items():
        _add(found, name, share)
    for column in found.columns[1:]:
        column.justify = "right"
    return found


def _add(found: Table, name: str, share: Share) -> None:
    if share.value is None:
        return
    low, high = share.interval()
    found.add_row(name, str(share.num_right), str(share.num), f"{share.value:.1%}", f"{low:.1%} - {high:.1%}")


def footnotes(evaluation: Evaluation) -> list[str]:
    told = evaluation.identity
    who = f"{told.model} at {told.url}" if told.url else f"{told.model}, {told.dtype}"
    notes = [
        f"{who}, seed {evaluation.seed}, greedy. Intervals are Wilson's, over questions; {NUM_DEPTHS} questions of a "
        "recall row share a document."
    ]
    if evaluation.router_load:
        notes.append("Router load, max/mean by layer: " + ", ".join(f"{load:.2f}" for load in evaluation.router_load))
    num_errors, messages = errors(evaluation.outcomes)
    if num_errors:
        notes.append(f"{num_errors} questions got no reply and count as wrong: " + "; ".join(messages))
    if evaluation.is_interrupted:
        notes.append("Interrupted: these are the questions that were answered.")
    return notes
