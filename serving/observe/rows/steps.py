"""A worker's steps as rows: what each one computed and how long host and device took for it.

A step is told when it is done, behind everything that clients wait for. What the device took is what the step added to
the time that the device had been busy: from its launch, or from the end of the step before it where that was later.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moonshard.serving.control.plan import CopyPlan, DecodePlan, LoadPlan, Plan, PrefillPlan
from moonshard.serving.engine.busy import BusyTime
from moonshard.serving.observe.rows.schema import TableRow

if TYPE_CHECKING:  # with jax, which a worker imports once its port is open
    from moonshard.serving.engine.device import StepDone

# What a step was for: partitions, batch, tokens, context tokens, blocks. A plain tuple, for it is made with each step.
type _Work = tuple[tuple[int, ...], int, int, int, int]


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """Where a worker's steps are recorded, under which address, and how many rows of it are lost."""

    append: Callable[[TableRow], None]
    worker: str
    num_lost: Callable[[], int] = lambda: 0

    def trace(self, *, epoch: bytes, role: str) -> "Callable[[StepDone, Plan | None], None]":
        return StepTrace(self.append, (self.worker, epoch.hex(), role))


class UnrecordedSteps(RecordedSteps):
    """Stands in where nothing is recorded, so that no row is made."""

    def trace(self, *, epoch: bytes, role: str) -> "Callable[[StepDone, Plan | None], None]":
        return lambda done, plan: None


NO_STEPS = UnrecordedSteps(append=lambda row: None, worker="")


class StepTrace:
    """The rows of one worker's steps; `append` takes them. Called on the event loop, in the order in which steps
    end.
    """

    def __init__(self, append: Callable[[TableRow], None], worker: tuple[str, str, str]) -> None:
        """`worker`: its address, epoch and role."""
        self._append = append
        self._worker = worker
        self._busy = BusyTime()

    def __call__(self, done: "StepDone", plan: Plan | None) -> None:
        """`plan` is None for an export and a land."""
        partitions, *sizes = _work_of(done, plan)
        device_ns = self._busy.added_ns(done.launched_ns, done.done_ns)
        self._append(
            (
                *self._worker,
                done.number,
                done.kind.value,
                partitions,
                done.bucket,
                *sizes,
                done.was_overlapped,
                done.launched_ns,
                done.enqueued_ns - done.launched_ns,
                device_ns,
                done.done_ns,
                time.perf_counter_ns(),
            )
        )


def _work_of(done: "StepDone", plan: Plan | None) -> _Work:
    match plan:
        case DecodePlan(rows=rows):
            num_tokens = sum([row.q_len for row in rows])
            num_context = sum([row.position for row in rows]) + num_tokens
            return _distinct({row.slot.partition for row in rows}), len(rows), num_tokens, num_context, 0
        case PrefillPlan(chunks=chunks):
            num_tokens = sum(len(chunk.tokens) for chunk in chunks)
            num_context = sum(chunk.start for chunk in chunks) + num_tokens
            return _distinct({chunk.slot.partition for chunk in chunks}), len(chunks), num_tokens, num_context, 0
        case LoadPlan(slot=slot):
            return (slot.partition,), 1, 0, 0, 0
        case CopyPlan(pairs=pairs):
            return _distinct({partition for partition, _, _ in pairs}), 0, 0, 0, len(pairs)
        case None:
            return (done.partition,), 0, 0, 0, done.num_blocks


def _distinct(partitions: set[int]) -> tuple[int, ...]:
    return tuple(partitions) if len(partitions) == 1 else tuple(sorted(partitions))
