"""The table of a profile: each part of a step beside its least, and below it the operations that take most of it."""

from collections.abc import Iterator
from dataclasses import replace

from moonshard.experiments.bench.floors.work import NOTHING, Ceilings, Work
from moonshard.experiments.bench.profile.record import OperationTime, Profile, StepProfile
from moonshard.experiments.common.grid import Grid, number

COLUMNS = (
    *("what", "runs", "ms", "of the step", "least MB", "least MFLOP"),
    *("of read bandwidth", "of f32 rate", "of its floor"),
)
MIN_SHARE = 0.01  # of a step: operations below stand together
NO_LEAST = ("",) * 5
WHOLE, ALL = "the step itself", "all operations"


def profile_grids(profile: Profile | None) -> list[Grid]:
    """A table for each step; none where nothing was profiled. Notes stand below the last."""
    if profile is None:
        return []
    grids = [
        Grid(title=f"Operations of {step.name}", columns=COLUMNS, rows=tuple(_rows(step, profile.ceilings)))
        for step in profile.steps
    ]
    return [*grids[:-1], replace(grids[-1], notes=_notes(profile.ceilings))]


def _notes(ceilings: Ceilings) -> tuple[str, ...]:
    return (
        f"This machine reads {ceilings.bytes_per_s / 1e9:.1f} GB/s and computes "
        f"{ceilings.matmul_flops_per_s / 1e9:.0f} GFLOP/s in float32. A part's floor is the slower of moving its least "
        "bytes and computing its least products at these rates; an even router is assumed.",
        "A step's own time is measured without the profiler. Operations run on several threads at once, so they may "
        "add up to more than the step.",
    )


def _rows(step: StepProfile, ceilings: Ceilings) -> Iterator[tuple[str, ...]]:
    whole = sum(step.least.values(), start=NOTHING) if step.least else None
    yield (WHOLE, "", *_time(step.step_ms, step), *_least(whole, step.step_ms, ceilings))
    yield (ALL, "", *_time(step.operations_ms, step), *NO_LEAST)
    parts = dict.fromkeys(one.part for one in step.operations)
    totals = {part: sum(one.ms for one in step.operations if one.part == part) for part in parts}
    for part in sorted(parts, key=lambda part: -totals[part]):
        yield (part, "", *_time(totals[part], step), *_least(step.least.get(part), totals[part], ceilings))
        for kind, ms, count in _shown([one for one in step.operations if one.part == part], step):
            yield (f"· {kind}", number(count), *_time(ms, step), *NO_LEAST)


def _shown(operations: list[OperationTime], step: StepProfile) -> Iterator[tuple[str, float, float]]:
    """Of a part; nothing of one that takes next to no time."""
    small = [one for one in operations if one.ms < MIN_SHARE * step.step_ms]
    if len(small) == len(operations):
        return
    for one in operations:
        if one not in small:
            yield one.kind, one.ms, one.count
    if small:
        yield f"{len(small)} others", sum(one.ms for one in small), sum(one.count for one in small)


def _time(ms: float, step: StepProfile) -> tuple[str, str]:
    return number(ms), f"{ms / step.step_ms:.0%}"


def _least(work: Work | None, ms: float, ceilings: Ceilings) -> tuple[str, ...]:
    if work is None:
        return NO_LEAST
    shares = (
        work.num_bytes / ceilings.bytes_per_s,
        work.num_flops / ceilings.matmul_flops_per_s,
        work.floor_s(ceilings),
    )
    return (number(work.num_bytes / 1e6), number(work.num_flops / 1e6), *(f"{s * 1e3 / ms:.0%}" for s in shares))
