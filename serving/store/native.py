"""A process that is not ours: how it is started, awaited and ended, and what it says."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from moonshard.kv.mooncake import LOGGED_WHERE_ALL_IS_WELL
from moonshard.kv.store.mooncake.answers import answers
from moonshard.kv.store.mooncake.faults import StoreUnavailable
from moonshard.serving.deploy.children.tether import tethered

PROBE_TIMEOUT_S = 0.25
POLL_S = 0.02
LAST_LINES = 20
MAX_LINE_BYTES = 64 * 1024


class NativeProcess:
    """One process in a session of its own, over its lives: `start` may be called again once it has ended.

    It ends at the latest with the thread that has started it.
    """

    def __init__(
        self, argv: Sequence[str], *, environment: Mapping[str, str], address: str, on_line: Callable[[str], None]
    ):
        """`address`: host:port, where it answers."""
        self.name = Path(argv[0]).name
        self._argv = tuple(argv)
        self._environment = dict(environment)
        self._address = address
        self._on_line = on_line
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)

    @property
    def pid(self) -> int | None:
        """None while it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Returns before it answers. StoreUnavailable where somebody else does, or the system starts no process."""
        if answers(self._address, timeout_s=PROBE_TIMEOUT_S):
            raise StoreUnavailable(f"{self.name} cannot be started: something answers at {self._address} already")
        output, output_end = os.pipe()
        os.set_blocking(output_end, False)  # while nobody reads, its lines are lost instead of waiting
        try:
            self._process = subprocess.Popen(
                tethered(self._argv),
                stdin=subprocess.DEVNULL,
                stdout=output_end,
                stderr=output_end,
                env=os.environ | self._environment,
                start_new_session=True,
            )
        except OSError as error:
            os.close(output)
            raise StoreUnavailable(f"{self.name} cannot be started: {error}") from error
        finally:
            os.close(output_end)
        self._last_lines.clear()
        self._reader = threading.Thread(target=self._read, args=(output,), name=self.name, daemon=True)
        self._reader.start()

    def wait_until_it_answers(self, timeout_s: float) -> None:
        """StoreUnavailable, with its last words, where it ends instead, or does not answer in time."""
        deadline_s = time.perf_counter() + timeout_s
        while (code := self._wait(POLL_S)) is None and not answers(self._address, timeout_s=PROBE_TIMEOUT_S):
            if time.perf_counter() > deadline_s:
                raise StoreUnavailable(f"{self.name} does not answer after {timeout_s:g} s: {self._last_words()}")
        if code is not None:
            self._join()
            raise StoreUnavailable(f"{self.name} ended with {code}: {self._last_words()}")

    def wait(self) -> str:
        """How it ended, in words, once it has. Blocks until then."""
        assert self._process is not None
        code = self._process.wait()
        self._join()
        return f"{self.name} ended with {code}: {self._last_words()}"

    def stop(self, timeout_s: float) -> None:
        """SIGTERM, and SIGKILL where it has not ended after `timeout_s`. Nothing of it runs afterwards."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        self._process.send_signal(signal.SIGCONT)  # one that somebody has stopped would never hear of it
        if self._wait(timeout_s) is None:
            self._process.kill()
            self._process.wait()
        self._join()
        self._process = None

    def _wait(self, timeout_s: float) -> int | None:
        """The exit code, None where it still runs."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def _join(self) -> None:
        if self._reader is not None:
            self._reader.join()

    def _last_words(self) -> str:
        return " | ".join(self._last_lines) or "it said nothing"

    def _read(self, output: int) -> None:
        with open(output, "rb") as lines:
            while line := lines.readline(MAX_LINE_BYTES):
                text = line.decode(errors="replace").rstrip()
                if not any(known in text for known in LOGGED_WHERE_ALL_IS_WELL):
                    self._last_lines.append(text)
                    self._on_line(text)
