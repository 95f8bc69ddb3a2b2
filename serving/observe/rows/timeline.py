"""A recording as one time line in the JSON that Perfetto and Chrome open: gateway, prefill, transfer and decode.

Pure: rows come as mappings, and what leaves are dictionaries. A request is a row of nested slices under its gateway,
and one under "transfer" where its KV moved; a worker has a row for its device's work and one for its host's launches.
Microseconds, from the first stamp of all. Stamps of one clock keep their distances to the nanosecond; those of several
hosts are as good as the hosts' time of day.
Format: "Trace Event Format", JSON object, nestable async events ("b", "e") and complete events ("X"). The identity of
an async event is its process's own (`id2.local`): by a global one a reader stacks a request's transfer upon its phases,
though it ends in another phase than it begins in.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from moonshard.serving.observe.rows.schema import PHASES

type Record = Mapping[str, Any]
type TimelineEvent = dict[str, Any]

_GATEWAYS, _PREFILL, _TRANSFERS, _DECODE = range(4)  # the order of the processes
_DEVICE, _HOST = 1, 2  # rows of a worker
_ARGUMENTS = (
    *("outcome", "error", "prompt_tokens", "cached_tokens", "tier_tokens", "completion_tokens", "num_retries"),
    *("prefill_worker", "decode_worker", "is_local_prefill", "lost_ns", "decode_queue_ms"),
    *("wire_ms", "handoff_gap_ms"),
)
_STEP_ARGUMENTS = ("number", "batch", "tokens", "context_tokens", "blocks", "bucket", "was_overlapped")


def timeline(requests: Iterable[Record], steps: Iterable[Record]) -> dict[str, Any]:
    """The whole file's content. Rows may come in any order."""
    requests, steps = list(requests), list(steps)
    clocks = _Clocks([*requests, *steps])
    tracks = _Tracks()
    events = [event for row in requests for event in _request_events(row, clocks, tracks)]
    events += [event for row in steps for event in _step_events(row, clocks, tracks)]
    start_ns = min((event["ts"] for event in events), default=0)
    for event in events:
        event["ts"] = (event["ts"] - start_ns) / 1e3
    return {"traceEvents": [*tracks.names(), *events], "displayTimeUnit": "ms"}


class _Clocks:
    """Each clock's offset to the time of day, the same for all its parts: two would put their stamps out of order."""

    def __init__(self, rows: Iterable[Record]) -> None:
        self._offsets_ns: dict[str, int] = {}
        for row in rows:
            known_ns = self._offsets_ns.get(row["clock"], row["unix_offset_ns"])
            self._offsets_ns[row["clock"]] = min(known_ns, row["unix_offset_ns"])

    def unix_ns(self, row: Record, stamp_ns: int) -> int:
        return stamp_ns + self._offsets_ns[row["clock"]]


class _Tracks:
    """The numbers of processes: gateways first, then the transfers, then workers by their role."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, str], int] = {}

    def number(self, order: int, name: str) -> int:
        return self._numbers.setdefault((order, name), len(self._numbers) + 1)

    def gateway(self, row: Record) -> int:
        return self.number(_GATEWAYS, f"gateway {row['host']} {row['pid']}")

    def transfers(self) -> int:
        return self.number(_TRANSFERS, "transfer")

    def worker(self, row: Record) -> int:
        order = _PREFILL if row["role"] == "prefill" else _DECODE
        return self.number(order, f"{row['role']} {row['worker']} {row['epoch'][:8]}")

    def names(self) -> Iterator[TimelineEvent]:
        for (order, name), number in sorted(self._numbers.items()):
            yield {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": order}}
            if order in (_PREFILL, _DECODE):
                for thread, title in ((_DEVICE, "device"), (_HOST, "launches")):
                    yield {"ph": "M", "name": "thread_name", "pid": number, "tid": thread, "args": {"name": title}}


def _request_events(row: Record, clocks: _Clocks, tracks: _Tracks) -> Iterator[TimelineEvent]:
    """A request's events in the order in which they nest: a reader takes events of one moment as they come."""
    pid, start_ns = tracks.gateway(row), clocks.unix_ns(row, row["received_ns"])
    arguments = {name: row[name] for name in _ARGUMENTS if row[name] is not None}
    identity = f"{row['host']} {row['pid']} {row['received_ns']} {row['request_id']}"
    begin, end = _slice(pid, identity, f"request {row['request_id']}", start_ns, start_ns + row["e2e_ns"])
    yield begin | {"args": arguments}
    for phase in PHASES:
        end_ns = start_ns + row[phase]
        if row[phase]:
            yield from _slice(pid, identity, phase.removesuffix("_ns"), start_ns, end_ns)
        start_ns = end_ns
    yield end
    if row["transferred_ns"] is not None:
        end_ns = clocks.unix_ns(row, row["transferred_ns"])
        begin_ns = end_ns - round(row["transfer_ms"] * 1e6)
        yield from _slice(tracks.transfers(), identity, f"transfer {row['request_id']}", begin_ns, end_ns)


def _step_events(row: Record, clocks: _Clocks, tracks: _Tracks) -> Iterator[TimelineEvent]:
    pid, done_ns = tracks.worker(row), clocks.unix_ns(row, row["done_ns"])
    arguments = {name: row[name] for name in _STEP_ARGUMENTS} | {"partitions": list(row["partitions"])}
    launched_ns = clocks.unix_ns(row, row["launched_ns"])
    for thread, start_ns, duration_ns in (
        (_DEVICE, done_ns - row["device_ns"], row["device_ns"]),
        (_HOST, launched_ns, row["host_ns"]),
    ):
        yield {
            "ph": "X",
            "name": row["kind"],
            "cat": "step",
            "pid": pid,
            "tid": thread,
            "ts": start_ns,
            "dur": duration_ns / 1e3,
            "args": arguments,
        }


def _slice(pid: int, identity: str, name: str, start_ns: int, end_ns: int) -> tuple[TimelineEvent, TimelineEvent]:
    """The begin and end events of a slice. Slices of one process's identity nest; those of different ones may
    overlap.
    """
    common = {"name": name, "cat": "request", "id2": {"local": identity}, "pid": pid, "tid": pid}
    return common | {"ph": "b", "ts": start_ns}, common | {"ph": "e", "ts": end_ns}
