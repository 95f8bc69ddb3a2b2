"""What a child and its supervisor say to each other, in either direction, and how a child ends with it.

Status goes as JSON lines over an inherited pipe, never over stdout or stderr, which belong to people. The events:
`progress` {message}, `listening` {address} or {http (a URL), grpc}, `timings` {timings, as `deploy.timings` tells
them}, `ready` {} or {message}, `draining` {}, `failed` {message, exit_code}. What a supervisor tells a process goes the
other way in the same form: to a gateway `workers` {addresses}, in the order of gateway.workers.
"""

import ctypes
import os
import re
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from moonshard.serving.config.keys import ConfigError

Status = Callable[[str, Mapping[str, object]], None]

PROGRESS_INTERVAL_S = 10.0
_COUNTED = re.compile(r"(?P<phase>.*) (?P<done>\d+)/(?P<total>\d+)")
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2  # prctl(2)


def open_status_pipe(fd: int) -> "StatusWriter":
    """Report over `fd` from now on, and be sent SIGTERM when its reader's process dies, even by SIGKILL (Linux); or the
    signal that whoever started this one has chosen for that, as `tether` does.

    ConfigError if `fd` is no open file; SystemExit if the reader is already gone.
    """
    try:
        os.set_inheritable(fd, False)
    except OSError as error:
        raise ConfigError([f"--status-fd {fd}: {error.strerror}"]) from error
    if sys.platform == "linux":
        _end_with_parent()
    if _is_reader_gone(fd):
        raise SystemExit(1)

    return StatusWriter(fd)


class StatusWriter:
    """Writes events to a pipe in their order, and never waits: what finds no room is kept, of progress the last."""

    def __init__(self, fd: int):
        os.set_blocking(fd, False)
        self._fd = fd
        self._lock = threading.Lock()  # of the rest
        self._rest = b""  # of a line that was begun
        self._waiting: deque[tuple[str, bytes]] = deque()  # event, line
        self._is_followed_up = False
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Events that were not written yet."""
        with self._lock:
            return len(self._waiting) + bool(self._rest)

    def __call__(self, event: str, fields: Mapping[str, object]) -> None:
        with self._lock:
            if event == "progress" and self._waiting and self._waiting[-1][0] == event:
                self._waiting.pop()
            self._waiting.append((event, msgspec.json.encode({"event": event, **fields}) + b"\n"))
            if not self._write() and not self._is_followed_up:
                self._is_followed_up = True
                threading.Thread(target=self._follow_up, name="status", daemon=True).start()

    def finish(self, timeout_s: float) -> None:
        """Waits until all is written, before the end of the process; what finds no room by then is lost."""
        poll, ends_s = select.poll(), time.monotonic() + timeout_s
        poll.register(self._fd, select.POLLOUT)
        while True:
            with self._lock:
                if self._write():
                    return
            if (left_s := ends_s - time.monotonic()) <= 0:
                return
            poll.poll(left_s * 1e3)

    def close(self) -> None:
        """Nothing is written any more. May be called again."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._fd)

    def _write(self) -> bool:
        """Whether everything is written, or will never be."""
        if self._is_closed:
            self._waiting.clear()
            return True
        try:
            while self._rest or self._waiting:
                self._rest = self._rest or self._waiting.popleft()[1]
                self._rest = self._rest[os.write(self._fd, self._rest) :]
        except BlockingIOError:
            return False
        except BrokenPipeError:  # the death signal is on its way
            self._waiting.clear()
            self._rest = b""
        return True

    def _follow_up(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        while True:
            poll.poll()
            with self._lock:
                if self._write():
                    self._is_followed_up = False
                    return


class StatusPrinter:
    """As `StatusWriter`, for a process that a person started: prints a line on stderr for each event."""

    def __init__(self):
        self._throttle = ProgressThrottle()

    def __call__(self, event: str, fields: Mapping[str, object]) -> None:
        if event == "timings":  # for a supervisor's table
            return
        text = describe(event, fields)
        if event != "progress" or self._throttle.is_due(text):
            sys.stderr.write(f"moonshard {text}\n")
            sys.stderr.flush()


class ProgressThrottle:
    """Which progress deserves a line where lines stay: the begin and the end of a phase, and now and then between.

    A phase's messages differ in the count at their end: `compiling 3/12`.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic):
        self._now_s = now_s
        self._phase = ""
        self._told_at_s = 0.0

    def is_due(self, message: str) -> bool:
        """Whether to tell it; if so, it counts as told."""
        counted = _COUNTED.fullmatch(message)
        phase, is_last = (counted["phase"], counted["done"] == counted["total"]) if counted else (message, False)
        now_s = self._now_s()
        if phase == self._phase and not is_last and now_s - self._told_at_s < PROGRESS_INTERVAL_S:
            return False
        self._phase, self._told_at_s = phase, now_s
        return True


def describe(event: str, fields: Mapping[str, object]) -> str:
    """An event in words: its message, else its name and fields."""
    if message := fields.get("message"):
        return str(message)
    return " ".join([event, *(f"{name}={value}" for name, value in fields.items())])


def _end_with_parent() -> None:
    libc, chosen = ctypes.CDLL(None), ctypes.c_int(0)
    libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(chosen))
    if not chosen.value:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _is_reader_gone(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLERR)
    return bool(poll.poll(0))
