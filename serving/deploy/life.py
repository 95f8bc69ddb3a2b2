"""The life of a process that serves, once it is there: ready, told to end, drained, closed.

A gateway and a worker live alike, and know nothing of each other. SIGTERM and SIGINT drain: whoever asks is told first,
what runs then finishes, or is cut off when the time is over. How each of them starts is its own: what is bound, loaded
and opened before it serves, and in which order that closes.
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
    """What lives: it serves already, or will by itself."""

    async def failure(self) -> BaseException:
        """Returns why, once it can serve no longer; what is left of it is then `fail`'s."""
        ...

    async def set_serving(self, is_serving: bool) -> None:
        """What health says from now on."""
        ...

    async def wait_ready(self) -> None: ...

    async def wait_not_ready(self) -> None:
        """Asked while it is ready: a gateway may lose its workers."""
        ...

    def on_ready(self) -> Mapping[str, object]:
        """It is ready for the first time; what is told with that, besides."""
        ...

    def on_told(self) -> None:
        """It was told that it is ready: time for what may come later."""
        ...

    def begin_drain(self) -> None:
        """Takes nothing new."""
        ...

    async def wait_idle(self) -> None: ...

    async def cut_off(self) -> None:
        """The time for a drain is over, and not all has ended."""
        ...

    async def close(self) -> None:
        """After a drain, however that ended."""
        ...

    def fail(self, error: BaseException) -> None:
        """Instead of `close`, where it cannot go on."""
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
    """Of a process in its role. `stop` is set when it is told to end."""

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
