"""`-m moonshard.serving.deploy.children.tether PID COMMAND...`: becomes the command, and dies with its parent PID.

Linux kills the process when the thread that started it ends, even by SIGKILL, and keeps that in mind over `exec`. It
has to be asked by the process itself: a hook between fork and exec is unsafe beside threads.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # prctl(2)


def tethered(argv: Sequence[str]) -> list[str]:
    """The argument list that runs `argv` so, for a child of this process."""
    return [sys.executable, "-m", "moonshard.serving.deploy.children.tether", str(os.getpid()), *argv]


def main(parent: str, *argv: str) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before this was asked
        raise SystemExit(1)
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main(*sys.argv[1:])
