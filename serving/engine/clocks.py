"""Where each request's time went on this worker: stamps of one process's clock, and the durations between them.

The engine says what happens, and when. A request comes in one of two ways: it is submitted, waits and is prefilled
here; or it joins with KV that landed and tokens drawn elsewhere.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from moonshard.serving.control.plan import DecodePlan, Plan, PrefillPlan
from moonshard.serving.control.request import Output


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases:
    """Where one sequence's time went on this worker, in milliseconds. A request that joined has the last three only."""

    queue_ms: float  # arrival to the launch of the first chunk
    prefill_ms: float  # launch of the first chunk to the first token on the host
    land_ms: float = 0.0  # the last manifest's arrival to the join
    join_ms: float = 0.0  # the join to the launch of the first step that has it
    decode_ms: float  # first token on the host, or that launch where it joined, to the last token on the host


@dataclass(slots=True)
class _Clocked:
    """The stamps of one request, in nanoseconds."""

    arrived_ns: int
    land_ms: float | None  # None: it did not join
    launched_ns: int | None = None
    first_token_ns: dict[int, int] = field(default_factory=dict)  # by choice: the first that was drawn here


class RequestClocks:
    """The clocks of the requests being served."""

    def __init__(self) -> None:
        self._clocks: dict[bytes, _Clocked] = {}
        self._unlaunched: set[bytes] = set()

    def start(self, request_id: bytes, now_ns: int, *, land_ms: float | None = None) -> None:
        """A request arrived. With `land_ms` it joined with landed KV, which took so long to land."""
        self._clocks[request_id] = _Clocked(arrived_ns=now_ns, land_ms=land_ms)
        self._unlaunched.add(request_id)

    def forget(self, request_id: bytes) -> None:
        self._clocks.pop(request_id, None)
        self._unlaunched.discard(request_id)

    def note_launch(self, plan: Plan, now_ns: int) -> None:
        """Stamps each request whose first chunk or row this is."""
        if self._unlaunched:
            for request_id in self._unlaunched.intersection(_request_ids(plan)):
                self._clocks[request_id].launched_ns = now_ns
                self._unlaunched.remove(request_id)

    def phases(self, output: Output, now_ns: int) -> Phases | None:
        """The phases that an output closes: those of a sequence's first output here, and of its last."""
        request_id, choice = output.sequence
        clock = self._clocks[request_id]
        if output.finish is None and choice in clock.first_token_ns:  # nearly every output
            return None
        first_ns = clock.first_token_ns.setdefault(choice, now_ns)
        launched_ns = clock.launched_ns if clock.launched_ns is not None else first_ns
        waited_ms = (launched_ns - clock.arrived_ns) / 1e6
        if clock.land_ms is not None:
            decode_ms = (now_ns - launched_ns) / 1e6
            return Phases(queue_ms=0, prefill_ms=0, land_ms=clock.land_ms, join_ms=waited_ms, decode_ms=decode_ms)
        prefill_ms, decode_ms = (first_ns - launched_ns) / 1e6, (now_ns - first_ns) / 1e6
        return Phases(queue_ms=waited_ms, prefill_ms=prefill_ms, decode_ms=decode_ms)


def _request_ids(plan: Plan) -> Iterable[bytes]:
    match plan:
        case PrefillPlan(chunks=chunks):
            return (chunk.request.id for chunk in chunks)
        case DecodePlan(rows=rows):
            return (row.sequence.request_id for row in rows)
        case _:
            return ()
