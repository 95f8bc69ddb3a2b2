"""The child's end of supervision: it says how far it is, and does not outlive the process that started it.

Status goes as JSON lines over an inherited pipe, never over stdout or stderr, which belong to people. The events:
`progress` {message}, `listening` {address} or {http (a URL), grpc}, `timings` {timings, as `serving.timings` tells
them}, `ready` {} or {message}, `draining` {}, `failed` {message, exit_code}.
"""

import contextlib
import ctypes
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping

import msgspec

from moonshard.serving.config import ConfigError

Status = Callable[[str, Mapping[str, object]], None]

PROGRESS_INTERVAL_S = 10.0
_COUNTED = re.compile(r"(?P<phase>.*) (?P<done>\d+)/(?P<total>\d+)")
_PR_SET_PDEATHSIG = 1  # prctl(2)


def open_status_pipe(fd: int) -> Status:
    """Report over `fd` from now on, and be sent SIGTERM when its reader's process dies, even by SIGKILL (Linux).

    ConfigError if `fd` is no open file; SystemExit if the reader is already gone.
    """
    try:
        os.set_inheritable(fd, False)
    except OSError as error:
        raise ConfigError([f"--status-fd {fd}: {error.strerror}"]) from error
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if _is_reader_gone(fd):
        raise SystemExit(1)

    def report(event: str, fields: Mapping[str, object]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the death signal is on its way
            os.write(fd, msgspec.json.encode({"event": event, **fields}) + b"\n")

    return report


class StatusPrinter:
    """The same for a process that a person started: a line on stderr for each event."""

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


def _is_reader_gone(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLERR)
    return bool(poll.poll(0))
