"""One child process: started in a session of its own, its status events and its output delivered line by line.

Where it is to be told something while it runs, that goes the other way in the same form: an event to a line.
A child never waits for its reader, which may be stopped, or hang at a terminal: its output finds no room then
(`unblocked_output`), and its status waits (`status_pipe`). The pipes are ours and not asyncio's, because
`Process.wait` of a process with asyncio pipes also waits for whoever else holds their write ends. Restarting and
ordering several children is `supervisor`'s.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from moonshard.serving.deploy.status_pipe import StatusWriter

MAX_LINE_BYTES = 64 * 1024
MAX_SHOWN = 200  # characters of a status line that cannot be read
LAST_WORDS_S = 1.0  # how long output may trickle in after the process has ended

OnEvent = Callable[[str, dict[str, object]], None]
OnLine = Callable[[str], None]


class Child:
    """A running process. `start_child` makes one."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        readers: Sequence[asyncio.Task[None]],
        orders: StatusWriter | None,
    ):
        self._process = process
        self._readers = readers
        self._orders = orders

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """The exit code, negative for a signal, once everything the child said has been delivered."""
        code = await self._process.wait()
        if self._orders is not None:
            self._orders.close()
        _, late = await asyncio.wait(self._readers, timeout=LAST_WORDS_S)
        for reader in late:
            reader.cancel()
        await asyncio.wait(self._readers)
        for reader in self._readers:
            if not reader.cancelled():
                reader.result()
        return code

    def tell(self, event: str, fields: Mapping[str, object]) -> None:
        """For one that was started with `is_told`. Never waits; what comes after its end is nobody's."""
        assert self._orders is not None
        self._orders(event, fields)

    def end_orders(self) -> None:
        """It is told nothing more, and hears that. What found no room so far is lost."""
        assert self._orders is not None
        self._orders.close()

    def signal(self, number: int) -> None:
        """SIGTERM goes to the process, which knows how to end; SIGKILL to all that share its session."""
        if self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):  # it ended by itself, and the loop has not heard of it yet
            (os.killpg if number == signal.SIGKILL else os.kill)(self.pid, number)


async def start_child(
    argv: Sequence[str],
    *,
    on_event: OnEvent,
    on_line: OnLine,
    is_told: bool = False,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Child:
    """Start `argv` with `--status-fd N` appended, and where it `is_told` something, `--orders-fd M` before that.

    `environment`: beside this process's own.
    OSError where there is no such program, or no process, memory or descriptor left.
    """
    status, status_end = os.pipe()
    output, output_end = os.pipe()
    orders_end, orders = os.pipe() if is_told else (None, None)
    os.set_blocking(output_end, False)  # while nobody reads, its libraries' lines are lost instead of waiting
    readers = [
        asyncio.create_task(hear(status, on_event=on_event, on_line=on_line)),
        asyncio.create_task(_read_lines(output, on_line)),
    ]
    told = [] if orders_end is None else ["--orders-fd", str(orders_end)]
    theirs = [fd for fd in (orders_end, status_end) if fd is not None]
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            *told,
            "--status-fd",
            str(status_end),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output_end,
            stderr=output_end,
            pass_fds=theirs,
            start_new_session=True,
            env={**os.environ, **environment},
        )
    except BaseException:
        if orders is not None:
            os.close(orders)
        raise
    finally:
        for fd in (*theirs, output_end):
            os.close(fd)
    return Child(process, readers, None if orders is None else StatusWriter(orders))


async def hear(fd: int, *, on_event: OnEvent, on_line: OnLine) -> None:
    """Delivers what comes through a pipe until its other end is closed: events, and as lines what is none."""
    await _read_lines(fd, lambda line: _deliver(line, on_event, on_line))


def _deliver(line: str, on_event: OnEvent, on_line: OnLine) -> None:
    """A status line. One that was cut off, as by the end of a killed process, is told as output."""
    try:
        fields = msgspec.json.decode(line, type=dict[str, object])
        event = str(fields.pop("event"))
    except (msgspec.MsgspecError, KeyError):
        on_line(f"unreadable status {line[:MAX_SHOWN]!r}")
        return
    on_event(event, fields)


async def _read_lines(fd: int, handle: OnLine) -> None:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    pipe = os.fdopen(fd, "rb", buffering=0)  # the transport closes it
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
    try:
        rest = b""
        while data := await reader.read(MAX_LINE_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                handle(line.decode(errors="replace"))
        if rest:
            handle(rest.decode(errors="replace"))
    finally:
        transport.close()
