"""A span that has ended, as whoever measured it hands it over to be exported.

Plain data, stamped by this process's clock: what it becomes for a collector is `otlp`'s, and is made on its thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from moonshard.serving.observe.spans.context import TraceContext

type SpanValue = str | int | float | bool | tuple[str, ...]
type SpanKindName = Literal["server", "client", "internal"]
CANCELLED = "cancelled"  # an outcome that is nobody's fault
MAX_NAME_CHARS = 512  # of what a client calls something


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedSpan:
    """`error`: its type in a word, which is no text of a client's; None where it did not fail."""

    name: str
    kind: SpanKindName
    context: TraceContext
    parent: TraceContext | None
    begun_ns: int  # perf_counter_ns
    ended_ns: int
    attributes: Mapping[str, SpanValue] = field(default_factory=dict)
    events: tuple[tuple[str, int], ...] = ()  # name and stamp
    error: str | None = None


def outcome_attributes(outcome: str | None) -> dict[str, SpanValue]:
    """Of what ended otherwise than it should; None: it did not."""
    attributes: dict[str, SpanValue] = {} if outcome is None else {"moonshard.outcome": outcome}
    if (error := error_of(outcome)) is not None:
        attributes["error.type"] = error
    return attributes


def error_of(outcome: str | None) -> str | None:
    """What makes the span an error: a request that its client gave up is none."""
    return None if outcome == CANCELLED else outcome


def bounded(name: str) -> str:
    """A client's word, cut to a bounded length, so that no client has us keep megabytes of it."""
    return name[:MAX_NAME_CHARS]


def fitting(number: int | None) -> int | None:
    """A client's number that nobody has checked; None where it does not fit in 64 bits."""
    return number if number is not None and -(2**63) <= number < 2**63 else None
