"""The verifier's figures, from results and the finish reasons of a reference.

Positive is who finished with tool calls. A request that failed did not; a line that could not be asked is in no table.
What nothing was there to measure by is None, not 0.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from moonshard.experiments.verification.results import TOOL_CALLS, Result


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A result, and the finish reason that the reference has for the same request."""

    result: Result
    reference: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Triggering:
    """Who called tools, over the requests that have a reference."""

    num_both: int
    num_server_only: int
    num_reference_only: int
    num_neither: int

    @property
    def num(self) -> int:
        return self.num_both + self.num_server_only + self.num_reference_only + self.num_neither

    @property
    def precision(self) -> float | None:
        return _share(self.num_both, self.num_both + self.num_server_only)

    @property
    def recall(self) -> float | None:
        return _share(self.num_both, self.num_both + self.num_reference_only)

    @property
    def f1(self) -> float | None:
        """The harmonic mean of both, as one fraction: 0 where nothing agrees, though one of them has no value."""
        return _share(2 * self.num_both, 2 * self.num_both + self.num_server_only + self.num_reference_only)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """How the requests ended."""

    num_succeeded: int
    num_failed: int
    reasons: Counter[str]  # why those that succeeded finished
    num_valid: int  # of those that finished with calls

    @property
    def num_calling(self) -> int:
        return self.reasons[TOOL_CALLS]

    @property
    def schema_accuracy(self) -> float | None:
        return _share(self.num_valid, self.num_calling)


def triggering(rows: Sequence[Row]) -> Triggering:
    asked = [row for row in rows if row.reference is not None and row.result.request is not None]
    found = Counter((row.result.has_calls, row.reference == TOOL_CALLS) for row in asked)
    return Triggering(
        num_both=found[True, True],
        num_server_only=found[True, False],
        num_reference_only=found[False, True],
        num_neither=found[False, False],
    )


def finished(rows: Sequence[Row]) -> Finished:
    succeeded = [row.result for row in rows if row.result.has_succeeded]
    return Finished(
        num_succeeded=len(succeeded),
        num_failed=len(rows) - len(succeeded),
        reasons=Counter(result.finish_reason for result in succeeded if result.finish_reason is not None),
        num_valid=sum(result.has_calls and result.tool_calls_valid is True for result in succeeded),
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
