"""A process of this interpreter that answers what a test asks it: a list in, its answer out, a line of JSON each."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class AskedProcess:
    """`arguments` follow the interpreter."""

    def __init__(self, arguments: Sequence[str], cwd: Path | None = None):
        command = [sys.executable, *arguments]
        self.process = subprocess.Popen(command, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *command: object) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def stop(self) -> None:
        """Stops the process; returns once it has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        self.wait_stopped()

    def wait_stopped(self) -> None:
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
