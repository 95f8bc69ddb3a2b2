"""The device thread: launches steps in order, and a second thread that waits for their tokens.

Two threads, so that the next step is enqueued while the last one's tokens are still on their way to the host. They see
nothing but steps; what a step means, and which comes next, is decided elsewhere. A fault ends both and is reported
once: the state on the device is then unknown, and the worker must go.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from moonshard.serving.engine.programs import Drawn, Launched
from moonshard.serving.engine.steps import Step, StepKind


class Executor(Protocol):
    """What runs steps: `engine.programs.Programs`, or a script in a test."""

    def launch(self, step: Step) -> Launched: ...

    def fetch(self, launched: Launched) -> Drawn | np.ndarray | None: ...


class StepDone(NamedTuple):
    """A step whose tokens or blocks are on the host. Times are of this process's `perf_counter_ns`."""

    number: int
    kind: StepKind
    drawn: Drawn | None
    exported: np.ndarray | None  # of an export: [bucket, layers, block_size, features]
    bucket: int
    partition: int  # of an export or a land, and how many blocks it moved
    num_blocks: int
    launched_ns: int
    enqueued_ns: int  # the launch returned
    done_ns: int
    was_overlapped: bool  # launched before the previous step's tokens had reached the host
    ticket: int | None = None  # of an export or a land: see `Step`


class _InFlight(NamedTuple):
    """A launched step. It keeps the step alive, whose payload the device may be reading."""

    step: Step
    launched: Launched
    launched_ns: int
    enqueued_ns: int
    was_overlapped: bool


class DeviceThread:
    """Owns an executor. `submit` never blocks; the callbacks run on the waiting thread."""

    def __init__(
        self,
        executor: Executor,
        *,
        on_done: Callable[[StepDone], None],
        on_failed: Callable[[BaseException], None],
    ):
        self._executor = executor
        self._on_done = on_done
        self._on_failed = on_failed
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._in_flight: queue.SimpleQueue[_InFlight | None] = queue.SimpleQueue()
        self._num_fetched = 0  # steps whose tokens reached the host
        self._threads = (
            threading.Thread(target=self._guard, args=(self._launch_all,), name="device", daemon=True),
            threading.Thread(target=self._guard, args=(self._fetch_all,), name="device-wait", daemon=True),
        )

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, step: Step) -> None:
        self._steps.put(step)

    def close(self) -> None:
        """Ends both threads once everything submitted has run."""
        self._steps.put(None)
        for thread in self._threads:
            thread.join()

    def _launch_all(self) -> None:
        num_launched = 0
        while (step := self._steps.get()) is not None:
            was_overlapped = self._num_fetched < num_launched
            launched_ns = time.perf_counter_ns()
            launched = self._executor.launch(step)
            enqueued_ns = time.perf_counter_ns()
            num_launched += 1
            self._in_flight.put(_InFlight(step, launched, launched_ns, enqueued_ns, was_overlapped))
        self._in_flight.put(None)

    def _fetch_all(self) -> None:
        while (flight := self._in_flight.get()) is not None:
            fetched = self._executor.fetch(flight.launched)
            self._num_fetched += 1
            if flight.step.allowed is not None and isinstance(fetched, Drawn):
                flight.step.allowed.tell(fetched.tokens, fetched.num_emitted)  # first: the next draw waits for it
            self._on_done(
                StepDone(
                    number=flight.step.number,
                    kind=flight.step.kind,
                    drawn=fetched if isinstance(fetched, Drawn) else None,
                    exported=fetched if isinstance(fetched, np.ndarray) else None,
                    bucket=flight.step.bucket,
                    partition=flight.step.partition,
                    num_blocks=flight.step.num_blocks,
                    launched_ns=flight.launched_ns,
                    enqueued_ns=flight.enqueued_ns,
                    done_ns=time.perf_counter_ns(),
                    was_overlapped=flight.was_overlapped,
                    ticket=flight.step.ticket,
                )
            )

    def _guard(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as error:  # whatever the device library raises: the state is lost
            self._in_flight.put(None)
            self._on_failed(error)
