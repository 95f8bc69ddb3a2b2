"""Which process on which host wrote a part, and the offset between its clock and the time of day.

Read once for each part: the time of day is corrected while a server runs, the clock of the stamps never is.
"""

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from moonshard.serving.observe.rows.schema import VERSION, TableRow

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """`clock` is the same for all processes whose stamps may be compared: those of one boot of one machine."""

    host: str
    clock: str
    pid: int

    def row(self) -> TableRow:
        """The columns `schema.ORIGIN`, as of now."""
        return (self.host, self.clock, self.pid, unix_offset_ns(), VERSION)


def this_process() -> Origin:
    """The origin of this process. Where the kernel names no boot, only its own stamps can be compared with each
    other.
    """
    host, pid = socket.gethostname(), os.getpid()
    try:
        clock = BOOT_ID.read_text().strip()
    except OSError:
        clock = f"{host}-{pid}"
    return Origin(host=host, clock=clock, pid=pid)


def unix_offset_ns() -> int:
    """What to add to a stamp for nanoseconds since 1970, read between two stamps so that it is half their gap off."""
    before_ns = time.perf_counter_ns()
    unix_ns = time.time_ns()
    return unix_ns - (before_ns + time.perf_counter_ns()) // 2
