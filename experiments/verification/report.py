"""The table, the footnotes and the JSON of a verification.

The JSON's first keys are those of the verifier's own summary, then come the measures and what they were taken from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from moonshard.experiments.verification.measures import Row, finished, triggering
from moonshard.experiments.verification.results import TOOL_CALLS

STOP = "stop"
MAX_FAILURES = 10  # shown
BARS = (
    "Public bars (MoonshotAI/K2-Vendor-Verifier, 2025-11-15): tool_call_f1 of at least 73% for K2-Thinking and 80% for "
    "K2-0905; the official API's schema_accuracy is 100%."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """What was asked of whom, and how it went."""

    url: str
    models: Sequence[str]
    rows: Sequence[Row]
    num_kept: int  # that an earlier run has asked
    num_left: int  # not answered, since it was interrupted


def to_json(verification: Verification) -> dict[str, Any]:
    ended, called = finished(verification.rows), triggering(verification.rows)
    others = {reason: num for reason, num in ended.reasons.items() if reason not in (STOP, TOOL_CALLS)}
    return {
        "model": ", ".join(verification.models),
        "success_count": ended.num_succeeded,
        "failure_count": ended.num_failed,
        "finish_stop": ended.reasons[STOP],
        "finish_tool_calls": ended.num_calling,
        "finish_others": sum(others.values()),
        "finish_others_detail": others,
        "schema_validation_error_count": ended.num_calling - ended.num_valid,
        "successful_tool_call_count": ended.num_valid,
        "tool_call_precision": called.precision,
        "tool_call_recall": called.recall,
        "tool_call_f1": called.f1,
        "schema_accuracy": ended.schema_accuracy,
        "url": verification.url,
        "reference": {
            "num": called.num,
            "num_both": called.num_both,
            "num_server_only": called.num_server_only,
            "num_reference_only": called.num_reference_only,
            "num_neither": called.num_neither,
        },
        "num_not_asked": verification.num_left,
    }


def table(verification: Verification) -> Table:
    """The figures as text; those that have no value are left out."""
    found = Table("figure", "value", "of", title="Tool calls", title_justify="left")
    ended, called = finished(verification.rows), triggering(verification.rows)
    num = len(verification.rows)
    found.add_row("succeeded", str(ended.num_succeeded), str(num))
    found.add_row("failed", str(ended.num_failed), str(num))
    for reason, count in ended.reasons.most_common():
        found.add_row(escape(f"finished: {reason}"), str(count), str(ended.num_succeeded))
    found.add_section()
    _add_share(found, "tool_call_precision", called.precision, called.num_both + called.num_server_only)
    _add_share(found, "tool_call_recall", called.recall, called.num_both + called.num_reference_only)
    _add_share(found, "tool_call_f1", called.f1, called.num)
    _add_share(found, "schema_accuracy", ended.schema_accuracy, ended.num_calling)
    for column in found.columns[1:]:
        column.justify = "right"
    return found


def failures(verification: Verification) -> Table | None:
    """The requests that failed and why, the first of them. None without any."""
    failed = [row.result for row in verification.rows if not row.result.has_succeeded]
    if not failed:
        return None
    found = Table("index", "error", title="Failed", title_justify="left")
    for result in failed[:MAX_FAILURES]:
        told = result.response
        found.add_row(str(result.data_index), escape(f"{told['error_type']}: {told['error_message']}"))
    if len(failed) > MAX_FAILURES:
        found.add_row("", f"and {len(failed) - MAX_FAILURES} more")
    return found


def footnotes(verification: Verification) -> list[str]:
    notes = [f"{', '.join(verification.models)} at {verification.url}. {_about_reference(verification)}", BARS]
    if verification.num_kept:
        notes.append(f"{verification.num_kept} answers are of an earlier run.")
    if verification.num_left:
        notes.append(f"Broken off: {verification.num_left} requests were not answered and are in no figure.")
    return notes


def _add_share(found: Table, name: str, share: float | None, num: int) -> None:
    if share is not None:
        found.add_row(name, f"{share:.2%}", str(num))


def _about_reference(verification: Verification) -> str:
    called = triggering(verification.rows)
    if not called.num:
        return "Without a reference tool_call_f1 is not computed; --reference names one."
    return (
        f"Against the reference's {called.num}: {called.num_both} called in both, {called.num_server_only} only here, "
        f"{called.num_reference_only} only there, {called.num_neither} in neither; who failed did not call."
    )
