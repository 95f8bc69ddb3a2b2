"""The table of number formats."""

from moonshard.experiments.bench.formats.record import Formats, FormatTimes
from moonshard.experiments.common.grid import Grid, number

MIB = 2**20


def formats_grid(found: Formats | None) -> Grid:
    """No rows where nothing was measured."""
    if found is None:
        return Grid(title="Number formats", columns=("format",), rows=(), notes=())
    first = found.times[0]
    decode = tuple(f"decode, batch {batch}, ms" for batch in first.decode_ms)
    prefill = tuple(f"prefill, {tokens:,} tokens, tokens/s" for tokens in first.prefill_ms)
    rows = tuple(_row(found, one) for one in found.times)
    return Grid(
        title="Number formats", columns=("weights", "held, MiB", *decode, *prefill), rows=rows, notes=_notes(found)
    )


def kernels_grid(found: Formats | None) -> Grid:
    """What each kernel reaches of the memory's bandwidth. No rows where none ran."""
    times = [] if found is None else [(one, own) for one in found.times for own in one.kernels]
    batches = tuple(dict.fromkeys(own.batch for _, own in times))
    cells: dict[tuple[str, str], list[str]] = {}
    for one, own in times:
        assert found is not None
        share = own.call_bytes / (own.call_us / 1e6) / found.ceilings.bytes_per_s
        cells.setdefault((one.name, own.kernel), []).append(f"{number(own.call_us)} ({share:.0%})")
    rows = tuple((f"{name}, {kernel}", *own) for (name, kernel), own in cells.items())
    columns = ("weights, kernel", *(f"batch {batch}, µs a layer" for batch in batches))
    notes = (
        "A kernel by itself, layer after layer, its threads woken and joined; in brackets the share of the bandwidth "
        "above that its weights and scales alone come to. Tokens draw their experts evenly.",
    )
    return Grid(title="Kernels by number format", columns=columns, rows=rows, notes=notes if rows else ())


def _row(found: Formats, one: FormatTimes) -> tuple[str, ...]:
    first = found.times[0]
    return (
        one.name,
        number(one.held_bytes / MIB),
        *(_decode(found, one, batch, first.decode_ms[batch] / ms) for batch, ms in one.decode_ms.items()),
        *(number(tokens / ms * 1e3) for tokens, ms in one.prefill_ms.items()),
    )


def _decode(found: Formats, one: FormatTimes, batch: int, times: float) -> str:
    share = one.decode_bytes[batch] / found.ceilings.bytes_per_s / (one.decode_ms[batch] / 1e3)
    return f"{number(one.decode_ms[batch])} ({times:.2f} x, {share:.0%})"


def _notes(found: Formats) -> tuple[str, ...]:
    gb_per_s = found.ceilings.bytes_per_s / 1e9
    return (
        f"One model in each format, all loaded at once, their steps in turns; medians. A decode step has "
        f"{found.context_tokens} tokens before it; in brackets how many times quicker it is than the first row's, and "
        f"the share of the {number(gb_per_s)} GB/s that this machine reads, by the bytes that it cannot do without: "
        "weights and scales as they are held, of experts as many as an even router hits, and cached keys.",
        "float32 and `as stored` are the folder as it is, held wider and as it is; the others are that folder "
        "converted (`moonshard convert`), so their values are not the same: int4 is of experts alone.",
    )
