"""A worker's steps as rows: what each one computed and how long host and device took for it.

A step is told when it is done, behind everything that clients wait for. What the device took is what the step added to
the time that the device had been busy: from its launch, or from the end of the step before it where that was later.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moonshard.serving.device import StepDone
from moonshard.serving.plan import CopyPlan, DecodePlan, LoadPlan, Plan, PrefillPlan
from moonshard.serving.trace.schema import Row


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """What a step was for. Of a load, only the slot's partition is known: it computes nothing."""

    partitions: tuple[int, ...]
    batch: int = 0
    tokens: int = 0
    context_tokens: int = 0
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """Where a worker's steps are recorded, and under which address."""

    append: Callable[[Row], None]
    worker: str

    def trace(self, *, epoch: bytes, role: str) -> "StepTrace":
        return StepTrace(self.append, (self.worker, epoch.hex(), role))


class StepTrace:
    """Of one worker; `append` takes its rows. Called on the event loop, in the order in which steps end."""

    def __init__(self, append: Callable[[Row], None], worker: tuple[str, str, str]) -> None:
        """`worker`: its address, epoch and role."""
        self._append = append
        self._worker = worker
        self._last_done_ns = 0

    def __call__(self, done: StepDone, plan: Plan | None) -> None:
        """`plan` is None for an export and a land."""
        work = _work_of(done, plan)
        device_ns = done.done_ns - max(done.launched_ns, self._last_done_ns)
        self._last_done_ns = done.done_ns
        self._append(
            (
                *self._worker,
                done.number,
                done.kind.value,
                work.partitions,
                done.bucket,
                work.batch,
                work.tokens,
                work.context_tokens,
                work.blocks,
                done.was_overlapped,
                done.launched_ns,
                done.enqueued_ns - done.launched_ns,
                device_ns,
                done.done_ns,
                time.perf_counter_ns(),
            )
        )


def _work_of(done: StepDone, plan: Plan | None) -> _Work:
    match plan:
        case DecodePlan(rows=rows):
            return _Work(
                partitions=_distinct(row.slot.partition for row in rows),
                batch=len(rows),
                tokens=len(rows),
                context_tokens=sum(row.position for row in rows) + len(rows),
            )
        case PrefillPlan(chunks=chunks):
            num_tokens = sum(len(chunk.tokens) for chunk in chunks)
            return _Work(
                partitions=_distinct(chunk.slot.partition for chunk in chunks),
                batch=len(chunks),
                tokens=num_tokens,
                context_tokens=sum(chunk.start for chunk in chunks) + num_tokens,
            )
        case LoadPlan(slot=slot):
            return _Work(partitions=(slot.partition,), batch=1)
        case CopyPlan(pairs=pairs):
            return _Work(partitions=_distinct(partition for partition, _, _ in pairs), blocks=len(pairs))
        case None:
            return _Work(partitions=(done.partition,), blocks=done.num_blocks)


def _distinct(partitions: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(partitions)))
