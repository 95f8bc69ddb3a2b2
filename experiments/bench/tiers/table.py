"""The table of tiers: GB/s of each beside a copy in memory and beside computing, and from which length they pay."""

from collections.abc import Iterator
from statistics import median

from moonshard.experiments.bench.tiers.record import TierTimes
from moonshard.experiments.bench.tiers.ways import MEMCPY
from moonshard.experiments.common.grid import Grid, number

COMPUTED = "computed"
COLUMNS = ("tokens", "MB", "way", "put, GB/s", "get, GB/s", "get and land, ms", "of computing")


def tiers_grid(found: TierTimes | None) -> Grid:
    """No rows where nothing was measured."""
    if found is None:
        return Grid(title="Tiers", columns=COLUMNS, rows=(), notes=())
    return Grid(title="Tiers", columns=COLUMNS, rows=tuple(_rows(found)), notes=_notes(found))


def shortest_worth_it(found: TierTimes, way: str) -> int | None:
    """The fewest tokens, of the lengths measured, from which on getting and landing takes less than computing."""
    ways = {one.num_blocks: one for one in found.moved if one.way == way}
    shortest = None
    for blocks in sorted(ways, reverse=True):
        if ways[blocks].median_get_s + median(found.land_s[blocks]) >= median(found.compute_s[blocks]):
            break
        shortest = blocks * found.block_tokens
    return shortest


def _rows(found: TierTimes) -> Iterator[tuple[str, ...]]:
    for blocks, computed in sorted(found.compute_s.items()):
        size, compute_s, land_s = blocks * found.block_bytes, median(computed), median(found.land_s[blocks])
        lead = (f"{blocks * found.block_tokens:,}", number(size / 1e6))
        for one in found.moved:
            if one.num_blocks != blocks:
                continue
            whole_s = one.median_get_s + land_s
            put, get = (number(size / median(samples) / 1e9) for samples in (one.put_s, one.get_s))
            is_tier = one.way != MEMCPY
            ends = (number(1e3 * whole_s), f"{whole_s / compute_s:.3f}") if is_tier else ("", "")
            yield (*lead, one.way, put, get, *ends)
        yield (*lead, COMPUTED, "", number(size / compute_s / 1e9), number(1e3 * compute_s), "1")


def _notes(found: TierTimes) -> tuple[str, ...]:
    ways = dict.fromkeys(one.way for one in found.moved if one.way != MEMCPY)
    lengths = sorted(blocks * found.block_tokens for blocks in found.compute_s)
    told = ", ".join(f"{way} {tokens or 'none'}" for way in ways for tokens in [shortest_worth_it(found, way)])
    return (
        f"Tiers: medians of calls that take turns; a block is {found.block_tokens} tokens and "
        f"{found.block_bytes / 1e6:.2f} MB. What was just put is got: `ssd` from the system's page cache, "
        "`ssd, uncached` after that was emptied of it, `ssd, O_DIRECT` past it. Puts are into that cache, but for "
        "O_DIRECT. `computed` is a prefill of so many tokens from nothing, of the device alone; its GB/s are the KV "
        "that it makes.",
        f"Worth it from so many tokens on, of {', '.join(map(str, lengths))}: {told}.",
    )
