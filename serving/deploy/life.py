"""The life of a process that serves, from when it is there: ready, told to end, drained, closed.

Gateway, worker and store live alike. SIGTERM and SIGINT begin a drain: whoever asks is told first, then what runs may
finish, or is cut off when the time is over. What is bound, loaded and opened before that, and in which order it is
closed, is `gateway.process`', `worker.process`' and `store.process`'.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from moonshard.serving.deploy.startup import ProcessStart, tell_start
from moonshard.serving.deploy.status_pipe import Status

if TYPE_CHECKING:
    from moonshard.serving.observe.rows.recorder import Recorder

SIGNALS = (signal.SIGTERM, signal.SIGINT)
FAILED_EXIT_CODE = 1


class Served(Protocol):
    """What `Life` drives: what serves already, or will without further calls."""

    async def failure(self) -> BaseException:
        """Returns why, once it can serve no longer; afterwards `fail` is called instead of `close`."""
        ...

    async def set_serving(self, is_serving: bool) -> None:
        """Sets what the health service says from now on."""
        ...

    async def wait_ready(self) -> None: ...

    async def wait_not_ready(self) -> None:
        """Awaited while it is ready: returns when it is no longer, as when a gateway loses its workers."""
        ...

    def on_ready(self) -> Mapping[str, object]:
        """Called when it is ready for the first time. Returns what is reported beside that."""
        ...

    def on_told(self) -> None:
        """Called after `ready` was reported: work that could wait may begin."""
        ...

    def begin_drain(self) -> None:
        """Takes nothing new from now on."""
        ...

    async def wait_idle(self) -> None: ...

    async def cut_off(self) -> None:
        """Called when the time for a drain is over and something still runs."""
        ...

    async def close(self) -> None:
        """Called after a drain, however that ended."""
        ...

    def fail(self, error: BaseException) -> None:
        """Called instead of `close` where it can serve no longer."""
        ...


@contextlib.contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """Set by the first SIGTERM or SIGINT; more of them within the block change nothing."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """The life of a process in its role. `stop` is set when the process is told to end."""

    role: str
    status: Status
    start: ProcessStart
    stop: asyncio.Event
    drain_timeout_s: float

    async def live(self, served: Served, *, name: str, recorder: "Recorder | None") -> int:
        """Until it is told to stop or has failed; the exit code.

        Its start is told, and recorded where there is a `recorder`, as that of the process `name`.
        """

        def tell() -> None:
            tell_start(self.start.timings, self.status, recorder, process=name, role=self.role)

        failure = asyncio.create_task(served.failure())
        readiness = asyncio.create_task(self._follow_readiness(served, tell))
        stopping = asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait({stopping, failure, readiness}, return_when=asyncio.FIRST_COMPLETED)
            if readiness.done():
                readiness.result()  # raises: it never ends by itself
            await _cancel(readiness)
            if not failure.done():
                await self._drain(served, failure)
            if failure.done():
                served.fail(failure.result())
                return FAILED_EXIT_CODE
            await served.close()
            return 0
        finally:
            await _cancel(failure, readiness, stopping)

    async def _follow_readiness(self, served: Served, tell: Callable[[], None]) -> None:
        """Health says all the time whether it is ready; `ready` is reported the first time."""
        await served.wait_ready()
        fields = served.on_ready()
        await served.set_serving(True)
        tell()
        self.status("ready", fields)
        served.on_told()
        while True:
            await served.wait_not_ready()
            await served.set_serving(False)
            await served.wait_ready()
            await served.set_serving(True)

    async def _drain(self, served: Served, failure: asyncio.Task[BaseException]) -> None:
        """Until nothing runs any more, it fails, or the time is over."""
        self.status("draining", {})
        served.begin_drain()
        await served.set_serving(False)
        idle = asyncio.create_task(served.wait_idle())
        done, _ = await asyncio.wait({idle, failure}, timeout=self.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if idle.done():
            idle.result()
        await _cancel(idle)
        if not done:
            await served.cut_off()


async def _cancel(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
