"""`moonshard store` as a child process of a test, with the two that it holds."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from moonshard.kv.store.mooncake.answers import answers
from moonshard.serving.store.ports import FREE_PORTS, free_ports

LIMIT_S = 30.0


def natives_of(pid: int) -> dict[str, psutil.Process]:
    """Mooncake's processes below one of ours, by name, those that run."""
    children = psutil.Process(pid).children(recursive=True)
    return {child.name(): child for child in children if child.name().startswith("mooncake")}


class StoreProcess:
    def __init__(self, address: str, **overrides: object):
        keys = {"kv.store.enabled": "true", "kv.store.dram_bytes": 64 * 1024**2, "kv.store.client": address}
        argv = [sys.executable, "-m", "moonshard.serving.cli", "store"]
        for key, value in {**keys, **overrides}.items():
            argv += ["--set", f"{key}={value}"]
        self.lines = list[str]()
        self.address = address
        self.process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
        self._is_told = threading.Event()  # that it is ready, or that it says nothing any more
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    @property
    def ready(self) -> str:
        """The line that it says when it is; waits for it."""
        assert self._is_told.wait(LIMIT_S)
        return next(line for line in self.lines if "ready;" in line)

    def end(self) -> int:
        code = self.process.wait(LIMIT_S)
        self._reading.join()
        return code

    def _read(self) -> None:
        assert self.process.stderr
        with self.process.stderr as lines:
            for line in lines:
                self.lines.append(line)
                if "ready;" in line:
                    self._is_told.set()
        self._is_told.set()


def first_of_free(num_ports: int) -> int:
    """The first of so many ports on end at which nothing listens."""
    for first in range(FREE_PORTS[0] + os.getpid() % 1000, FREE_PORTS[-1], num_ports):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + num_ports):
                stack.enter_context(socket.create_server(("", port)))
            return first
    raise OSError(f"no {num_ports} free ports on end")


@contextmanager
def running_store(address: str | None = None, **overrides: object) -> Iterator[StoreProcess]:
    """Nothing of it is left after the block."""
    store = StoreProcess(address or f"127.0.0.1:{free_ports(1)[0]}", **overrides)
    natives = dict[str, psutil.Process]()
    try:
        assert store.ready
        natives |= natives_of(store.process.pid)
        yield store
    finally:
        store.process.kill()
        store.end()
        psutil.wait_procs(natives.values(), timeout=LIMIT_S)
    assert not any(native.is_running() and native.status() != psutil.STATUS_ZOMBIE for native in natives.values())
    assert not answers(store.address, timeout_s=0.2)
