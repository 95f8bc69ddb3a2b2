"""The child's end of supervision: it says how far it is, and does not outlive the process that started it.

Status goes as JSON lines over an inherited pipe, never over stdout or stderr, which belong to people. The events:
`progress` {message}, `listening` {address} or {http (a URL), grpc}, `ready` {}, `failed` {message, exit_code}.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping

import msgspec

from moonshard.serving.config import ConfigError

Status = Callable[[str, Mapping[str, object]], None]

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


def print_status(event: str, fields: Mapping[str, object]) -> None:
    """The same for a process that a person started: a line on stderr for each event."""
    sys.stderr.write(f"moonshard {describe(event, fields)}\n")
    sys.stderr.flush()


def describe(event: str, fields: Mapping[str, object]) -> str:
    """An event in words: its message, else its name and fields."""
    if message := fields.get("message"):
        return str(message)
    return " ".join([event, *(f"{name}={value}" for name, value in fields.items())])


def _is_reader_gone(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLERR)
    return bool(poll.poll(0))
