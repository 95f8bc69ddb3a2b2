"""The transports' figures as measurements, and as a table beside Mooncake used bare and a copy in memory.

`transports` measures. Its second process is to load as little as possible, so the tables are made here.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from moonshard.experiments.common.grid import Grid, number, verdict
from moonshard.experiments.common.running.measurement import Measurement, Plan

if TYPE_CHECKING:
    from moonshard.experiments.bench.transfer.transports import Throughput

OURS, BARE = "mooncake", "mooncake, bare"
WAYS = ("memcpy", BARE, OURS, "grpc", "inproc")
BAR = 0.8  # of Mooncake used bare
COLUMNS = ("publish of", "in ranges of", *(f"{way}, GB/s" for way in WAYS), f"{OURS} / bare", f"bar {BAR}")
KIB, MIB = 1 << 10, 1 << 20


def measure_publishes(plan: Plan) -> list[Measurement]:
    """Measures all ways in one run. TransportUnavailable where Mooncake does not load."""
    from moonshard.experiments.bench.transfer.transports import measure_transports

    return as_measurements(
        measure_transports(sizes_bytes=plan.transfer_bytes, copy_bytes=plan.copy_bytes, rounds=plan.transfer_repeats)
    )


def as_measurements(found: "Iterable[Throughput]") -> list[Measurement]:
    return [
        Measurement(
            level="transports",
            name=_name(one.way, one.size_bytes, one.copy_bytes),
            unit="GB/s",
            samples=one.samples_gb_per_s,
        )
        for one in found
    ]


def transport_grid(measurements: Sequence[Measurement], plan: Plan) -> Grid:
    """A row for each size and range, with the ways side by side."""
    medians = {one.name: one.median for one in measurements if one.level == "transports"}
    sizes = [(size, min(copy, size)) for size in plan.transfer_bytes for copy in plan.copy_bytes]
    rows = []
    for size, copy in dict.fromkeys(sizes):
        by_way = {way: medians.get(_name(way, size, copy)) for way in WAYS}
        ours, bare = by_way[OURS], by_way[BARE]
        if ours is None or bare is None:
            continue
        cells = ["" if value is None else number(value) for value in by_way.values()]
        rows.append((_size(size), _size(copy), *cells, f"{ours / bare:.2f}", verdict(ours / bare >= BAR)))
    notes = (
        "Transports: publishes from one process into a slab of another over loopback, no range adjoining the next; "
        "`bare` is the library's own batch call, which spins; inproc and memcpy stay in one process.",
    )
    return Grid(title="KV transports", columns=COLUMNS, rows=tuple(rows), notes=notes if rows else ())


def _name(way: str, size_bytes: int, copy_bytes: int) -> str:
    return f"{way}, {_size(size_bytes)} in ranges of {_size(copy_bytes)}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"
