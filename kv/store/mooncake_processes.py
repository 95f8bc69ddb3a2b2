"""The native processes of Mooncake Store on one machine: how they are started, awaited and ended.

The master knows which blocks there are, who has them, and which are given up when memory is short. The client has the
memory, and beside the workers it outlives them. Both answer on loopback, but the client also listens at two ports of
all interfaces, without authentication, for clients on other machines: whoever reaches those can read and write the
memory. No setting that was tried changes that: run it on a network of its own.

Who starts them again when they end by themselves is the caller's to say. A client that comes back is empty, and
so is a master that comes back, though the client still has the memory.
Python needs none of the library's modules for this. What was measured is in `kv.store.mooncake_store`.
"""

import contextlib
import http.client
import importlib.util
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moonshard.kv.mooncake import INSTALL, LOGGED_WHERE_ALL_IS_WELL

LOOPBACK = "127.0.0.1"
FREE_PORTS = range(20_000, 32_000)  # not given to outgoing ones: a call to a dead server there could reach itself
NUM_PORTS_TRIED = 200
PROBE_TIMEOUT_S = 0.25
POLL_S = 0.02
LAST_LINES = 20
MAX_LINE_BYTES = 64 * 1024


class StoreUnavailable(Exception):
    """A start-up error: what the store needs is not installed, or one of its processes does not start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StorePorts:
    """Where the two processes answer, on loopback."""

    master: int
    metrics: int  # the master's, by HTTP
    client: int  # also names the socket by which the client takes workers' memory

    @classmethod
    def free(cls) -> "StorePorts":
        """Ports that nothing listens on now."""
        master, metrics, client = free_ports(3)
        return cls(master=master, metrics=metrics, client=client)

    @property
    def client_address(self) -> str:
        return f"{LOOPBACK}:{self.client}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreSettings:
    """What the processes are told at their start."""

    segment_bytes: int  # for all blocks; taken from the system as they come
    lease_s: float = 2.0  # for which a block that was asked for is not given up
    eviction_high_watermark: float = 0.9  # of the segment; from here on blocks are given up
    eviction_ratio: float = 0.1  # of all blocks, at once
    client_ttl_s: int = 10  # after so much silence the master forgets what a client has
    rpc_timeout_s: float = 1.0  # of the client's calls to the master; the library's own is 30 s
    num_threads: int = 16  # of the client; a call that waits for the master takes one


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreUsage:
    """As the master counts it, over all clients."""

    num_blocks: int
    bytes_held: int
    bytes_capacity: int
    num_evicted: int


def master_argv(ports: StorePorts, settings: StoreSettings) -> list[str]:
    """StoreUnavailable where there is no such binary."""
    return [
        str(_binary("mooncake_master")),
        f"--rpc_address={LOOPBACK}",
        f"--rpc_port={ports.master}",
        f"--metrics_host={LOOPBACK}",
        f"--metrics_port={ports.metrics}",
        f"--default_kv_lease_ttl={round(1000 * settings.lease_s)}",
        f"--eviction_high_watermark_ratio={settings.eviction_high_watermark}",
        f"--eviction_ratio={settings.eviction_ratio}",
        f"--client_ttl={settings.client_ttl_s}",
        "--enable_metric_reporting=false",  # a line of them in the log every few seconds
        "--minloglevel=2",
    ]


def client_argv(ports: StorePorts, settings: StoreSettings) -> list[str]:
    """StoreUnavailable where there is no such binary."""
    return [
        str(_binary("mooncake_client")),
        f"--host={LOOPBACK}",
        f"--port={ports.client}",
        f"--master_server_address={LOOPBACK}:{ports.master}",
        "--metadata_server=P2PHANDSHAKE",
        "--protocol=tcp",
        f"--global_segment_size={settings.segment_bytes}",
        "--local_buffer_size=0",
        f"--threads={settings.num_threads}",
    ]


def client_environment(settings: StoreSettings) -> dict[str, str]:
    """Besides the caller's own."""
    timeout_ms = str(max(1, round(1000 * settings.rpc_timeout_s)))
    return {"MC_LOG_LEVEL": "ERROR", "MC_RPC_TIMEOUT_MS": timeout_ms, "MC_RPC_CONNECT_TIMEOUT_MS": timeout_ms}


class NativeProcess:
    """One process in a session of its own, over its lives: `start` may be called again once it has ended."""

    def __init__(
        self, argv: Sequence[str], *, environment: Mapping[str, str], port: int, on_line: Callable[[str], None]
    ):
        self.name = Path(argv[0]).name
        self._argv = tuple(argv)
        self._environment = dict(environment)
        self._port = port
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
        if answers(f"{LOOPBACK}:{self._port}", timeout_s=PROBE_TIMEOUT_S):
            raise StoreUnavailable(f"{self.name} cannot be started: something answers at port {self._port} already")
        output, output_end = os.pipe()
        os.set_blocking(output_end, False)  # while nobody reads, its lines are lost instead of waiting
        try:
            self._process = subprocess.Popen(
                self._argv,
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
        while (code := self._wait(POLL_S)) is None and not answers(
            f"{LOOPBACK}:{self._port}", timeout_s=PROBE_TIMEOUT_S
        ):
            if time.perf_counter() > deadline_s:
                raise StoreUnavailable(f"{self.name} does not answer after {timeout_s:g} s: {self._last_words()}")
        if code is not None:
            self._join()
            raise StoreUnavailable(f"{self.name} ended with {code}: {self._last_words()}")

    def stop(self, timeout_s: float) -> None:
        """SIGTERM, and SIGKILL where it has not ended after `timeout_s`. Nothing of it runs afterwards."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
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


class MooncakeProcesses:
    """The master and this machine's client."""

    def __init__(
        self, ports: StorePorts, settings: StoreSettings, *, on_line: Callable[[str], None] = lambda _line: None
    ):
        """`on_line` is told what they log, from threads of theirs. StoreUnavailable where a binary is missing."""
        self.ports = ports
        environment = client_environment(settings)
        self.master = NativeProcess(
            master_argv(ports, settings), environment=environment, port=ports.master, on_line=on_line
        )
        self.client = NativeProcess(
            client_argv(ports, settings), environment=environment, port=ports.client, on_line=on_line
        )

    @property
    def pids(self) -> tuple[int, ...]:
        """Of those that run."""
        return tuple(pid for process in (self.master, self.client) if (pid := process.pid) is not None)

    def start(self, timeout_s: float = 30.0) -> None:
        """Returns once both answer. StoreUnavailable where one does not; then neither runs."""
        try:
            for process in (self.master, self.client):
                process.start()
                process.wait_until_it_answers(timeout_s)
        except StoreUnavailable:
            self.stop()
            raise

    def stop(self, timeout_s: float = 5.0) -> None:
        """May be called again."""
        for process in (self.client, self.master):
            process.stop(timeout_s)


def answers(address: str, *, timeout_s: float) -> bool:
    """Whether a server closes a connection on which nothing was sent: one that is stopped or busy never does.

    ValueError where the address is not host:port.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(1) == b""
    except OSError:
        return False


def read_usage(ports: StorePorts, *, timeout_s: float) -> StoreUsage | None:
    """None where the master does not tell."""
    connection = http.client.HTTPConnection(LOOPBACK, ports.metrics, timeout=timeout_s)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return StoreUsage(
            num_blocks=int(values["master_key_count"]),
            bytes_held=int(values["master_allocated_bytes"]),
            bytes_capacity=int(values["master_total_capacity_bytes"]),
            num_evicted=int(values["master_evicted_key_count"]),
        )
    except (OSError, http.client.HTTPException, KeyError, ValueError):
        return None
    finally:
        connection.close()


def free_ports(num_ports: int) -> list[int]:
    """Different ports of loopback that nothing listens on now. OSError where none are found."""
    found = list[int]()
    for port in random.sample(FREE_PORTS, NUM_PORTS_TRIED):
        with contextlib.suppress(OSError), socket.create_server((LOOPBACK, port)):
            found.append(port)
        if len(found) == num_ports:
            return found
    raise OSError(f"no {num_ports} free ports from {FREE_PORTS.start} to {FREE_PORTS.stop - 1}")


def _binary(name: str) -> Path:
    package = importlib.util.find_spec("mooncake")
    if package is None or not package.submodule_search_locations:
        raise StoreUnavailable(INSTALL.format(error="there is no package mooncake"))
    path = Path(package.submodule_search_locations[0]) / name
    if not os.access(path, os.X_OK):
        raise StoreUnavailable(INSTALL.format(error=f"{path} is not there, or cannot be executed"))
    return path
