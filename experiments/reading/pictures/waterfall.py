"""One request as a waterfall: the gateway's phases, which add up to its whole time, and what workers did meanwhile.

The gateway's phases lie where its stamps say. Workers and transfers report durations and no stamps: they are drawn as
near to the phases as they can be, half of the wire before the workers and half behind, the decode worker's reservation
before the prefill that waits for it, and what ends with the last token ends with it. For the time line of a whole
recording use `moonshard trace`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from matplotlib.axes import Axes

from moonshard.experiments.reading.pictures.colours import colour
from moonshard.rpc.types import Timing

LANES = ("gateway", "lost attempts", "prefill worker", "transfer", "decode worker", "client")
_NS_FIELDS = ("e2e", "ttft", "gateway_queue", "first_token", "decode", "finish", "lost")


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A span of time, in milliseconds from the request's arrival at the gateway."""

    lane: str
    name: str
    start_ms: float
    length_ms: float

    @property
    def end_ms(self) -> float:
        return self.start_ms + self.length_ms


def timing_of(row: Mapping[str, Any]) -> Timing:
    """The times in a row of the table `requests`; what is null or has no column counts as 0."""
    found = {f"{name}_ms": (row[f"{name}_ns"] or 0) / 1e6 for name in _NS_FIELDS}
    names = [field.name for field in fields(Timing) if field.name not in found]
    return Timing(**found, **{name: row.get(name) or 0 for name in names})


def slices(timing: Timing) -> list[Slice]:
    """The spans that are longer than 0. The lane "gateway" has no gap and ends with the request."""
    return [one for one in (*_gateway(timing), *_workers(timing), *_waits(timing)) if one.length_ms > 0]


def draw_waterfall(axes: Axes, timing: Timing) -> None:
    """A lane for each part of the system that took part; a slice's time is written behind its name."""
    found = slices(timing)
    lanes = [lane for lane in LANES if any(one.lane == lane for one in found)]
    for index, one in enumerate(found):
        place = lanes.index(one.lane)
        axes.barh(place, one.length_ms, left=one.start_ms, height=0.7, color=colour(index), label=_said(one))
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel("ms since the request arrived")
    if found:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")


def _said(one: Slice) -> str:
    return f"{one.lane}: {one.name}, {one.length_ms:.1f} ms"


def _gateway(timing: Timing) -> Iterator[Slice]:
    start_ms = 0.0
    for name, length_ms in timing.phases().items():
        said = name.removesuffix("_ms").replace("_", " ")
        yield Slice(lane="gateway", name=said, start_ms=start_ms, length_ms=length_ms)
        start_ms += length_ms


def _workers(timing: Timing) -> Iterator[Slice]:
    is_moved = timing.transfer_ms > 0
    lane = "prefill worker" if is_moved else "decode worker"
    lost_ms = timing.gateway_queue_ms
    yield Slice(lane="lost attempts", name="lost", start_ms=lost_ms, length_ms=timing.lost_ms)
    reserve_ms = lost_ms + timing.lost_ms + max(0.0, timing.wire_ms) / 2
    yield Slice(lane="decode worker", name="reserve", start_ms=reserve_ms, length_ms=timing.decode_queue_ms)
    start_ms = reserve_ms + timing.decode_queue_ms
    prefilled_ms = start_ms + timing.worker_queue_ms + timing.worker_prefill_ms
    yield Slice(lane=lane, name="queue", start_ms=start_ms, length_ms=timing.worker_queue_ms)
    begun_ms = start_ms + timing.worker_queue_ms
    yield Slice(lane=lane, name="prefill", start_ms=begun_ms, length_ms=timing.worker_prefill_ms)
    if is_moved:
        begun_ms = prefilled_ms + timing.exposed_transfer_ms - timing.transfer_ms
        yield Slice(lane="transfer", name="KV", start_ms=begun_ms, length_ms=timing.transfer_ms)
    end_ms = timing.gateway_queue_ms + timing.first_token_ms + timing.decode_ms
    parts = (("land", timing.land_ms), ("join", timing.join_ms), ("decode", timing.worker_decode_ms))
    begun_ms = end_ms - sum(length_ms for _, length_ms in parts)
    for name, length_ms in parts:
        yield Slice(lane="decode worker", name=name, start_ms=begun_ms, length_ms=length_ms)
        begun_ms += length_ms


def _waits(timing: Timing) -> Iterator[Slice]:
    """What its client waits for."""
    first_ms = timing.gateway_queue_ms + timing.first_token_ms
    yield Slice(lane="client", name="first token", start_ms=0.0, length_ms=first_ms)
    yield Slice(lane="client", name="handoff gap", start_ms=first_ms, length_ms=timing.handoff_gap_ms)
