"""One place in a deployment, over the lives of the processes that fill it: each is started again when it has ended.

One that fails before any of its role was ready is given up: that is a start that cannot succeed. Later it is tried
again for ever, ever more rarely.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from moonshard.serving.deploy.children.child import OnEvent, OnLine
from moonshard.serving.deploy.status_pipe import describe


class ChildFailed(Exception):
    """A child that cannot serve: it failed before it was ever ready."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartLimits:
    """How patient the supervisor is."""

    gateway_drain_s: float = 24.0  # the gateway goes first; after this the workers are told too
    drain_s: float = 27.0  # of gateway and workers, then SIGKILL
    beside_s: float = 5.0  # of what is beside them, once they have ended; likewise
    first_backoff_s: float = 0.25  # of a child that crashed; doubled with each crash that follows
    max_backoff_s: float = 30.0
    settled_s: float = 60.0  # a child that has served so long works: its next crash is the first again

    def backoff_s(self, num_crashes: int) -> float:
        """How long to wait after so many crashes in a row, 1 or more."""
        doublings = min(num_crashes - 1, 60)  # beyond that a float overflows sooner or later
        return min(self.max_backoff_s, self.first_backoff_s * 2**doublings)


@dataclass(frozen=True, slots=True)
class Fault:
    """How a process failed."""

    message: str
    exit_code: int
    is_silent: bool = False  # it gave no reason


class Reporter(Protocol):
    """Who is told the news."""

    def event(self, child: str, event: str, fields: Mapping[str, object]) -> None: ...
    def line(self, child: str, text: str) -> None: ...
    def note(self, text: str) -> None: ...


class Process(Protocol):
    """A process that was started, wherever it runs."""

    async def wait(self) -> int:
        """The exit code, negative for a signal, once everything it said has been delivered."""
        ...

    def signal(self, number: int) -> None:
        """SIGTERM goes to the process; SIGKILL to all that it has started, and ends it for sure."""
        ...


class Launch(Protocol):
    """Starts the process of a role. Where that takes time and comes to nothing, the process says that it `failed`."""

    async def __call__(self, name: str, argv: Sequence[str], *, on_event: OnEvent, on_line: OnLine) -> Process:
        """OSError for one that cannot be started now."""
        ...


# An argument list, given what an earlier process of the role listened on. It may have to wait for what it names.
Argv = Callable[[Mapping[str, object] | None], Coroutine[None, None, list[str]]]


class ChildRole:
    """One place in the deployment, over the lives of the processes that fill it."""

    def __init__(self, name: str, argv: Argv, launch: Launch, reporter: Reporter, limits: RestartLimits):
        self.name = name
        self.listening: Mapping[str, object] | None = None  # what its present process listens on, or the last one did
        self.ready = asyncio.Event()  # set for good when the first process is ready
        self._argv = argv
        self._launch = launch
        self._reporter = reporter
        self._limits = limits
        self._listens = asyncio.Event()  # its present process does, and goes on
        self._retired = asyncio.Event()
        self._signal: int | None = None  # the last one sent: a process that is just being started gets it too
        self._child: Process | None = None
        self._is_launching = False
        self._failure: Fault | None = None  # what the current process said before it ended
        self._ready_at_s: float | None = None  # when the current process was, by the loop's clock
        self._was_given_up = False  # the current process, for another's sake
        self.on_ended: Callable[[], None] = lambda: None  # a process has ended by itself
        self.on_listening: Callable[[], None] = lambda: None
        self.task = asyncio.create_task(self._run(), name=name)

    async def heard(self) -> Mapping[str, object]:
        """What its process listens on, once there is one that does and that was not given up."""
        await self._listens.wait()
        assert self.listening is not None
        return self.listening

    def retire(self) -> None:
        """No process of this role is started again."""
        self._retired.set()

    def give_up(self) -> None:
        """Ends the current process, if there is one; the next is started as after a crash."""
        self._listens.clear()
        if self._retired.is_set() or not (self._child or self._is_launching):
            return
        self._was_given_up = True
        if self._child:
            self._child.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        self._signal = number
        if self._child:
            self._child.signal(number)

    async def _run(self) -> None:
        """One process after another, until retired (returns). ChildFailed if none was ever ready."""
        num_crashes = 0  # in a row
        while not self._retired.is_set():
            fault = await self._live()
            if self._retired.is_set():
                return
            if not self._was_given_up:
                self.on_ended()
            if fault is None:
                num_crashes = 0
                await self._after_drain()
                continue
            num_crashes = 1 if self._has_settled() else num_crashes + 1
            await self._after_crash(fault, num_crashes)

    async def _live(self) -> "Fault | None":
        """Run one process to its end: what was wrong with that, None for nothing."""
        self._failure, self._ready_at_s, self._was_given_up = None, None, False
        if (argv := await self._unless_retired(self._argv(self.listening))) is None:
            return None
        try:
            child = self._child = await self._launched(argv)
        except OSError as error:  # no process, memory or descriptor left: the others may give some back
            return Fault(f"{self.name} could not be started: {error.strerror or error}", 1)
        try:
            if self._was_given_up:
                child.signal(signal.SIGKILL)
            elif self._signal is not None:
                child.signal(self._signal)
            return self._fault(await child.wait())
        finally:
            child.signal(signal.SIGKILL)  # only when cancelled does it still run
            self._child = None
            self._listens.clear()

    async def _launched(self, argv: Sequence[str]) -> Process:
        self._is_launching = True
        try:
            return await self._launch(self.name, argv, on_event=self._on_event, on_line=self._on_line)
        finally:
            self._is_launching = False

    async def _unless_retired[T](self, wanted: Coroutine[None, None, T]) -> T | None:
        """The result of `wanted`; None where no process is to be started any more."""
        task, retired = asyncio.create_task(wanted), asyncio.create_task(self._retired.wait())
        try:
            await asyncio.wait({task, retired}, return_when=asyncio.FIRST_COMPLETED)
            return await task if task.done() else None
        finally:
            task.cancel()
            retired.cancel()

    def _fault(self, code: int) -> "Fault | None":
        """How the process failed that ended with this code, in its own words where it had any."""
        if code == 0 and self._ready_at_s is not None:
            return None
        if self._failure is None:
            return Fault(f"{self.name} {_ending(code)}", max(code, 1), is_silent=True)
        if not self.ready.is_set():
            return self._failure  # at a start all are about to fail alike; later, one does
        return replace(self._failure, message=f"{self.name}: {self._failure.message}")

    def _has_settled(self) -> bool:
        """Whether the process that has just ended had served long enough to count as one that works."""
        now_s = asyncio.get_running_loop().time()
        return self._ready_at_s is not None and now_s - self._ready_at_s >= self._limits.settled_s

    async def _after_drain(self) -> None:
        """The process ended in order because somebody else told it to: that counts as no crash, and the next one is
        started after the shortest wait.
        """
        self._reporter.note(f"{self.name} has drained and ended; starting it again")
        await _wait_for(self._retired, timeout_s=self._limits.first_backoff_s)

    async def _after_crash(self, fault: "Fault", num_crashes: int) -> None:
        """Wait before the next process. ChildFailed if none was ever ready."""
        if not self.ready.is_set():
            when = " before it was ready" if fault.is_silent else ""
            raise ChildFailed(fault.message + when, fault.exit_code)
        delay_s = self._limits.backoff_s(num_crashes)
        if num_crashes == 1:
            self._reporter.note(f"{fault.message}; restarting it")
        else:
            self._reporter.note(f"{fault.message}, {num_crashes} times in a row; trying again in {delay_s:g} s")
        await _wait_for(self._retired, timeout_s=delay_s)

    def _on_event(self, event: str, fields: dict[str, object]) -> None:
        if event == "listening" and not self._was_given_up:
            self.listening = fields
            self._listens.set()
            self.on_listening()
        elif event == "ready":
            self._ready_at_s = asyncio.get_running_loop().time()
            self.ready.set()
        elif event == "failed":
            exit_code = fields.get("exit_code")
            self._failure = Fault(describe(event, fields), exit_code if isinstance(exit_code, int) else 1)
        self._reporter.event(self.name, event, fields)

    def _on_line(self, text: str) -> None:
        self._reporter.line(self.name, text)


def _ending(code: int) -> str:
    """How a process ended, in words, by its exit code as asyncio gives it: negative for a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by {signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'}"


async def _wait_for(event: asyncio.Event, *, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
