"""Which trace a request belongs to: W3C's `traceparent` and `tracestate`, read and written, and who is sampled.

Free of OpenTelemetry's SDK, so that whoever passes a context on loads none of it. What is malformed counts as absent:
the request then begins a trace of its own. Source: W3C Trace Context, https://www.w3.org/TR/trace-context/.
"""

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SPAN_ID_BYTES = 8
TRACE_ID_BYTES = 16
SAMPLED = 0x01
MAX_STATE_CHARS = 512
MAX_STATE_MEMBERS = 32
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[\x20-\x7e]*)?", re.ASCII)
_MEMBER = re.compile(  # key, perhaps of one tenant of a vendor, and value
    r"([a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]",
    re.ASCII,
)
_SPAN_ID = slice(36, 52)  # of a traceparent


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span, as the spans below it know it."""

    trace_id: bytes
    span_id: bytes
    flags: int
    state: str = ""  # as a header's value; empty: none

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{self.flags:02x}"

    def child(self, span_id: bytes | None = None) -> "TraceContext":
        """Another span of the trace; its id is drawn where none is given."""
        return TraceContext(self.trace_id, span_id or secrets.token_bytes(SPAN_ID_BYTES), self.flags, self.state)


def read_context(headers: Callable[[str], Sequence[str]]) -> TraceContext | None:
    """`headers` gives all values of a header, by its lower-case name. None where no valid `traceparent` is there."""
    parents = headers("traceparent")
    return parse_context(parents[0].strip(" \t"), ",".join(headers("tracestate"))) if len(parents) == 1 else None


def parse_context(traceparent: str, tracestate: str) -> TraceContext | None:
    """None for a traceparent that is malformed; a tracestate that is malformed, or too long to carry, is left out."""
    found = _PARENT.fullmatch(traceparent)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(bytes.fromhex(trace_id), bytes.fromhex(span_id), int(flags, 16), _state(tracestate))


def with_span(traceparent: str, span_id: bytes) -> str:
    """The same trace with another span, as `TraceContext.traceparent` writes it."""
    return f"{traceparent[: _SPAN_ID.start]}{span_id.hex()}{traceparent[_SPAN_ID.stop :]}"


def _state(text: str) -> str:
    if not text or len(text) > MAX_STATE_CHARS:
        return ""
    members = [member for part in text.split(",") if (member := part.strip(" \t"))]
    keys = {member.partition("=")[0] for member in members}
    is_valid = len(keys) == len(members) <= MAX_STATE_MEMBERS and all(map(_MEMBER.fullmatch, members))
    return ",".join(members) if is_valid else ""


class TraceSampling:
    """Which requests have spans. A trace's own id decides, as in OpenTelemetry's SDKs, so that services agree."""

    def __init__(self, ratio: float, *, is_parent_based: bool = True) -> None:
        """`ratio` of the traces that begin here; with `is_parent_based` whoever began the others has decided."""
        self._bound = round(ratio * 2**64)
        self._is_parent_based = is_parent_based

    def begin(self, parent: TraceContext | None) -> TraceContext:
        """A span below `parent`, or the first of a trace."""
        trace_id = secrets.token_bytes(TRACE_ID_BYTES) if parent is None else parent.trace_id
        if parent is not None and self._is_parent_based:
            return parent.child()
        is_sampled = int.from_bytes(trace_id[8:]) < self._bound
        flags, state = (0, "") if parent is None else (parent.flags & ~SAMPLED, parent.state)
        return TraceContext(trace_id, secrets.token_bytes(SPAN_ID_BYTES), flags | is_sampled, state)
