"""Workers, one gateway and what is beside them as child processes: started together, restarted when they end by
themselves, ended together.

A child that fails before any of its role was ready ends everything: that is a start that cannot succeed. Later, one
that cannot come back is tried again for ever, ever more rarely, while the others serve.

It knows processes and status events, neither models nor ports: `Commands` says what to run, `Launch` where workers run,
`Reporter` takes the news. The gateway and what is beside the workers run on this machine; of workers that come back
elsewhere the gateway is told. A gang's followers are started once its leader listens, whenever that is started again.
Ending is bounded: a drain that takes too long is cut off with SIGKILL, and nothing is left running.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Protocol

from moonshard.serving.deploy.children.child import Child, OnEvent, OnLine, start_child
from moonshard.serving.deploy.children.role import (
    Argv,
    ChildFailed,
    ChildRole,
    Launch,
    Process,
    Reporter,
    RestartLimits,
)

# An argument list, given what an earlier process of the role listened on: the next one must take its place.
Command = Callable[[Mapping[str, object] | None], list[str]]


class Commands(Protocol):
    """The commands to run."""

    @property
    def beside(self) -> Mapping[str, Command]:
        """What workers use and need not wait for, by name: started before them, and ended after them."""
        ...

    @property
    def workers(self) -> Mapping[str, Command]:
        """The workers by name, in the order in which the gateway is told of them."""
        ...

    def followers(self, worker: str, address: str) -> Mapping[str, Command]:
        """The other processes of a worker that is a gang, by name, once it is known where the first one listens."""
        ...

    def gateway(self, workers: Sequence[str], previous: Mapping[str, object] | None) -> list[str]: ...


async def launch_here(
    name: str,
    argv: Sequence[str],
    *,
    on_event: OnEvent,
    on_line: OnLine,
    environments: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> Process:
    """On this machine, as a child of this process. `environments`: beside its own, by the child's name."""
    return await start_child(argv, on_event=on_event, on_line=on_line, environment=environments.get(name, {}))


class _News:
    """A reporter that keeps what children say until `begin`: of a start that is refused nobody hears but why."""

    def __init__(self, reporter: Reporter):
        self._reporter = reporter
        self._kept: list[Callable[[], None]] | None = []

    def event(self, child: str, event: str, fields: Mapping[str, object]) -> None:
        self._tell(partial(self._reporter.event, child, event, fields))

    def line(self, child: str, text: str) -> None:
        self._tell(partial(self._reporter.line, child, text))

    def note(self, text: str) -> None:
        self._reporter.note(text)

    def begin(self) -> None:
        kept, self._kept = self._kept or [], None
        for tell in kept:
            tell()

    def _tell(self, tell: Callable[[], None]) -> None:
        if self._kept is None:
            tell()
        else:
            self._kept.append(tell)


class Supervisor:
    """`start`, then `watch`, and `stop` in every case. `launch` starts the workers' processes."""

    def __init__(self, commands: Commands, reporter: Reporter, limits: RestartLimits, launch: Launch = launch_here):
        self._commands = commands
        self._launch = launch
        self._reporter = _News(reporter)
        self._limits = limits
        self._beside: list[ChildRole] = []
        self._workers: list[ChildRole] = []
        self._followers: list[ChildRole] = []
        self._gateway: ChildRole | None = None
        self._starting: asyncio.Task[Mapping[str, object]] | None = None  # of what waits for the workers' addresses
        self._told: Child | None = None  # the gateway's present process

    async def start(self, check: Callable[[], object] = lambda: None) -> Mapping[str, object]:
        """Start all; returns what the gateway listens on once every child is ready. ChildFailed if one ends before.

        The gateway starts as soon as the workers' addresses are known: it binds its ports while models load. `check`
        runs meanwhile, on a thread: what it raises is raised, as soon as it is known, and until it has ended nothing is
        reported of the children.
        """
        self._beside = [
            self._start_role(name, _at_once(command), launch_here) for name, command in self._commands.beside.items()
        ]
        self._workers = [
            self._start_role(name, _at_once(command), self._launch) for name, command in self._commands.workers.items()
        ]
        for worker in self._workers:
            worker.on_listening = self._tell_gateway
        checking = asyncio.create_task(self._checked(check))
        starting = self._starting = asyncio.create_task(self._start_gateway())
        try:
            await asyncio.wait({checking, starting}, return_when=asyncio.FIRST_EXCEPTION)
            if checking.done():
                checking.result()
            return await starting
        except ChildFailed:
            self._reporter.begin()
            raise
        finally:
            checking.cancel()
            starting.cancel()

    async def _checked(self, check: Callable[[], object]) -> None:
        await asyncio.to_thread(check)
        self._reporter.begin()

    async def _start_gateway(self) -> Mapping[str, object]:
        addresses = await self._unless_failed(_addresses(self._workers))
        for worker, address in zip(self._workers, addresses, strict=True):
            self._start_gang(worker, address)
        command = _at_once(lambda previous: self._commands.gateway(self._worker_addresses, previous))
        gateway = self._gateway = self._start_role("gateway", command, self._launch_gateway)
        await self._unless_failed(_all_ready(self._roles))
        return gateway.listening or {}

    async def _launch_gateway(self, name: str, argv: Sequence[str], *, on_event: OnEvent, on_line: OnLine) -> Process:
        """Here; and what changed since its command line was made is told."""
        self._told = await start_child(argv, on_event=on_event, on_line=on_line, is_told=True)
        self._tell_gateway()
        return self._told

    def _tell_gateway(self) -> None:
        if self._told is not None:
            self._told.tell("workers", {"addresses": self._worker_addresses})

    @property
    def _worker_addresses(self) -> list[str]:
        """Where each worker listens, or did last. All have listened by the time that a gateway is started."""
        return [str(worker.listening["address"]) for worker in self._workers if worker.listening is not None]

    async def watch(self) -> None:
        """Returns never: whatever a child does from now on, it is started again."""
        await self._unless_failed(asyncio.Event().wait())

    async def stop(self) -> None:
        """Drain the gateway, then the workers, then what is beside them. Nothing runs afterwards.

        What is left of the former is killed when `drain_s` is over, of the latter `beside_s` later.
        """
        limits, loop = self._limits, asyncio.get_running_loop()
        begun = loop.time()
        if self._starting is not None:  # from here on it starts nothing that would not be told to end
            self._starting.cancel()
            await asyncio.wait({self._starting})
        for role in self._roles:
            role.retire()
        if self._gateway:
            self._gateway.signal(signal.SIGTERM)
            await _wait_until(begun + limits.gateway_drain_s, [self._gateway])
        for worker in (*self._workers, *self._followers):
            worker.signal(signal.SIGTERM)
        served = [role for role in self._roles if role not in self._beside]
        await self._end(served, begun + limits.drain_s, limits.drain_s)
        for role in self._beside:
            role.signal(signal.SIGTERM)
        await self._end(self._beside, loop.time() + limits.beside_s, limits.beside_s)
        await asyncio.gather(*(role.task for role in self._roles), return_exceptions=True)

    async def _end(self, roles: Sequence[ChildRole], deadline: float, patience_s: float) -> None:
        """Waits for the roles until then, and kills those that have not ended."""
        await _wait_until(deadline, roles)
        for role in roles:
            if not role.task.done():
                self._reporter.note(f"{role.name} did not end within {patience_s:g} s and is killed")
            role.signal(signal.SIGKILL)

    def kill(self) -> None:
        """End everything at once; a `stop` in progress then returns."""
        for role in self._roles:
            role.retire()
            role.signal(signal.SIGKILL)

    @property
    def _roles(self) -> list[ChildRole]:
        return [*self._beside, *self._workers, *self._followers, *([self._gateway] if self._gateway else [])]

    def _start_gang(self, leader: ChildRole, address: str) -> None:
        """The other processes of a worker. When one of them ends, none of the others is of use any more."""
        names = self._commands.followers(leader.name, address)
        followers = [self._start_role(name, self._follower_argv(leader, name), self._launch) for name in names]
        gang = [leader, *followers] if followers else []
        for member in gang:
            member.on_ended = partial(_end_others, gang, member)
        self._followers += followers

    def _follower_argv(self, leader: ChildRole, name: str) -> Argv:
        async def argv(previous: Mapping[str, object] | None) -> list[str]:
            address = str((await leader.heard())["address"])
            return self._commands.followers(leader.name, address)[name](previous)

        return argv

    def _start_role(self, name: str, argv: Argv, launch: Launch) -> ChildRole:
        return ChildRole(name, argv, launch, self._reporter, self._limits)

    async def _unless_failed[T](self, wanted: Coroutine[None, None, T]) -> T:
        """The result of `wanted`, or the ChildFailed of whichever role fails first."""
        task = asyncio.create_task(wanted)
        try:
            await asyncio.wait({task, *(role.task for role in self._roles)}, return_when=asyncio.FIRST_COMPLETED)
            for role in self._roles:
                if role.task.done():
                    role.task.result()
            return await task
        finally:
            task.cancel()


def _at_once(command: Command) -> Argv:
    async def argv(previous: Mapping[str, object] | None) -> list[str]:
        return command(previous)

    return argv


async def supervise(
    commands: Commands,
    reporter: Reporter,
    limits: RestartLimits,
    *,
    on_ready: Callable[[Mapping[str, object]], None],
    check: Callable[[], object] = lambda: None,
    launch: Launch = launch_here,
) -> int:
    """Serve until SIGINT or SIGTERM, then drain; a second SIGINT kills. Returns the exit code of the whole.

    `check` runs on a thread while the children start; what it raises ends them, and is raised.
    """
    supervisor = Supervisor(commands, reporter, limits, launch)
    interrupts = _Interrupts(on_second=supervisor.kill)
    serving = asyncio.create_task(_serve(supervisor, on_ready, check))
    asked = asyncio.create_task(interrupts.first.wait())
    await asyncio.wait({serving, asked}, return_when=asyncio.FIRST_COMPLETED)
    failure = serving.exception() if serving.done() else None
    for task in (serving, asked):
        task.cancel()
    await asyncio.wait((serving, asked))
    if failure is None:
        reporter.note(f"draining for at most {limits.drain_s:g} s; a second Ctrl-C ends at once")
    await supervisor.stop()
    if isinstance(failure, ChildFailed):
        reporter.note(failure.message)
        return failure.exit_code
    if failure:
        raise failure
    return 130 if interrupts.is_impatient else 0


async def _serve(
    supervisor: Supervisor, on_ready: Callable[[Mapping[str, object]], None], check: Callable[[], object]
) -> None:
    on_ready(await supervisor.start(check))
    await supervisor.watch()


class _Interrupts:
    """SIGINT and SIGTERM as one event; only a second SIGINT is impatience."""

    def __init__(self, on_second: Callable[[], None]):
        self.first = asyncio.Event()
        self._num_interrupts = 0
        self._on_second = on_second
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.first.set)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)

    @property
    def is_impatient(self) -> bool:
        return self._num_interrupts > 1

    def _interrupt(self) -> None:
        self._num_interrupts += 1
        self.first.set()
        if self.is_impatient:
            self._on_second()


def _end_others(gang: Sequence[ChildRole], ended: ChildRole) -> None:
    for member in gang:
        if member is not ended:
            member.give_up()


async def _addresses(workers: Sequence[ChildRole]) -> list[str]:
    return [str((await worker.heard())["address"]) for worker in workers]


async def _all_ready(roles: Sequence[ChildRole]) -> None:
    for role in roles:
        await role.ready.wait()


async def _wait_until(deadline: float, roles: Sequence[ChildRole]) -> None:
    """Until all the roles have ended, or the loop's clock says `deadline`."""
    timeout_s = max(0.0, deadline - asyncio.get_running_loop().time())
    if roles:
        await asyncio.wait([role.task for role in roles], timeout=timeout_s)
