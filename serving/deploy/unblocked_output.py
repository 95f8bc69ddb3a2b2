"""stdout and stderr that hold nobody up: what finds no room is dropped and counted, and the count is said later.

A write to a terminal that somebody has stopped (Ctrl-S) or to a pipe that nobody reads waits until that changes, and
with the event loop that logs a line waits every stream on it. This does not cover what libraries write to the
descriptor without Python. Under a supervisor their lines find no room without being counted (see `children.child`);
elsewhere they wait.
"""

import contextlib
import io
import os
import socket
import stat
import sys
from collections.abc import Buffer, Callable, Iterator


class UnblockedOutput(io.RawIOBase):
    """Writes to where `fd` leads, without waiting and without an error: a full disk or a closed terminal is no room."""

    def __init__(self, fd: int):
        super().__init__()
        self.num_dropped_lines = 0
        self._fd = fd
        self._num_untold = 0
        self._is_torn = False  # a line was begun that the rest of did not follow
        self._resources = contextlib.ExitStack()
        self._put = _unblocked_put(fd, self._resources)

    def write(self, data: Buffer, /) -> int:
        """All of it is taken: what was not written is counted as dropped."""
        head, rest = self._head(), bytes(data)
        whole = head + rest
        num_written = self._put_most(whole)
        if num_written > 0:
            self._is_torn = num_written < len(whole) and not whole[:num_written].endswith(b"\n")
        if num_written >= len(head):
            self._num_untold = 0
        self._drop(whole[max(num_written, len(head)) :])
        return len(rest)

    def close(self) -> None:
        if not self.closed:
            self.write(b"")  # the last chance to tell
            self._resources.close()
            super().close()

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def _head(self) -> bytes:
        """What comes before the next line: the rest of a line that was cut, and how many bytes were dropped."""
        torn = b"\n" if self._is_torn else b""
        told = f"moonshard: {self._num_untold} lines of output found no room here and were dropped\n".encode()
        return torn + (told if self._num_untold else b"")

    def _drop(self, rest: bytes) -> None:
        num_lines = rest.count(b"\n")
        self.num_dropped_lines += num_lines
        self._num_untold += num_lines

    def _put_most(self, data: bytes) -> int:
        """How many bytes found room. A head that found only part of it will be told again."""
        num_written = 0
        with contextlib.suppress(OSError):
            while num_written < len(data):
                num_written += self._put(data[num_written:])
        return num_written


@contextlib.contextmanager
def unblocked_output() -> Iterator[None]:
    """Makes this process's stdout and stderr unblocked inside the block, where they lead to a file descriptor."""
    replaced = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    with contextlib.ExitStack() as opened:
        for name, stream in replaced.items():
            if (fd := _descriptor(stream)) is not None:
                setattr(sys, name, opened.enter_context(_text(fd, stream)))
        try:
            yield
        finally:
            for name, stream in replaced.items():
                getattr(sys, name).flush()
                setattr(sys, name, stream)


def _text(fd: int, like: io.TextIOBase) -> io.TextIOWrapper:
    like.flush()
    buffered = io.BufferedWriter(UnblockedOutput(fd))
    return io.TextIOWrapper(buffered, encoding=like.encoding, errors=like.errors, line_buffering=True)


def _descriptor(stream: io.TextIOBase | None) -> int | None:
    """The stream's file descriptor; None for a stream in memory, as tests have, or where there is no stream."""
    try:
        return None if stream is None else stream.fileno()
    except (OSError, ValueError):  # what io.UnsupportedOperation is
        return None


def _unblocked_put(fd: int, resources: contextlib.ExitStack) -> Callable[[bytes], int]:
    """A write that raises OSError where it would have to wait.

    Whether a write waits is a property of the open file, which may be shared with a shell: so a terminal or a pipe is
    opened once more. Where that is not allowed (a terminal of another user) writes wait as ever.
    """
    mode = os.fstat(fd).st_mode
    if stat.S_ISSOCK(mode):
        peer = resources.enter_context(socket.socket(fileno=os.dup(fd)))
        return lambda data: peer.send(data, socket.MSG_DONTWAIT)
    if stat.S_ISFIFO(mode) or os.isatty(fd):
        with contextlib.suppress(OSError):
            fd = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            resources.callback(os.close, fd)
    return lambda data: os.write(fd, data)
