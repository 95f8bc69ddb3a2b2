"""The native processes of Mooncake Store on one machine: how they are started, awaited and ended.

The master knows which blocks there are, who has them, and which are given up when memory is short. The client has the
memory, and beside the workers it outlives them. Both answer on loopback, but the client also listens at two ports of
all interfaces, without authentication, for clients on other machines: whoever reaches those can read and write the
memory. No setting that was tried changes that: run it on a network of its own.

Who starts them again when they end by themselves is the caller's to say. A client that comes back is empty, and
so is a master that comes back, though the client still has the memory.
Python needs none of the library's modules for this. What was measured is in `kv.store.mooncake`.
"""

import contextlib
import http.client
import importlib.util
import os
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moonshard.kv.mooncake import INSTALL, ports_environment
from moonshard.kv.store.mooncake.library import StoreUnavailable
from moonshard.serving.store.native import NativeProcess

LOOPBACK = "127.0.0.1"
FREE_PORTS = range(20_000, 32_000)  # not given to outgoing ones: a call to a dead server there could reach itself
NUM_PORTS_TRIED = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class StorePorts:
    """Where the two processes answer: the master on loopback."""

    master: int
    metrics: int  # the master's, by HTTP
    client: int  # also names the socket by which the client takes workers' memory
    client_host: str = LOOPBACK  # an address of this machine; other machines' clients reach it there

    @classmethod
    def free(cls) -> "StorePorts":
        """Ports that nothing listens on now."""
        master, metrics, client = free_ports(3)
        return cls(master=master, metrics=metrics, client=client)

    @property
    def client_address(self) -> str:
        return f"{self.client_host}:{self.client}"

    @property
    def master_address(self) -> str:
        return f"{LOOPBACK}:{self.master}"


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
    ports: tuple[int, int] | None = None  # first and last of those that the client opens on all interfaces


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


def client_argv(ports: StorePorts, settings: StoreSettings, master_address: str) -> list[str]:
    """StoreUnavailable where there is no such binary."""
    return [
        str(_binary("mooncake_client")),
        f"--host={ports.client_host}",
        f"--port={ports.client}",
        f"--master_server_address={master_address}",
        "--metadata_server=P2PHANDSHAKE",
        "--protocol=tcp",
        f"--global_segment_size={settings.segment_bytes}",
        "--local_buffer_size=0",
        f"--threads={settings.num_threads}",
    ]


def client_environment(settings: StoreSettings) -> dict[str, str]:
    """Besides the caller's own."""
    timeout_ms = str(max(1, round(1000 * settings.rpc_timeout_s)))
    variables = {"MC_LOG_LEVEL": "ERROR", "MC_RPC_TIMEOUT_MS": timeout_ms, "MC_RPC_CONNECT_TIMEOUT_MS": timeout_ms}
    return variables | ports_environment(settings.ports)


class MooncakeProcesses:
    """This machine's client, and the master unless that is somebody else's."""

    def __init__(
        self,
        ports: StorePorts,
        settings: StoreSettings,
        *,
        master_address: str | None = None,
        on_line: Callable[[str], None] = lambda _line: None,
    ):
        """`master_address`: host:port of a master that runs already; None: one is started.

        `on_line` is told what they log, from threads of theirs. StoreUnavailable where a binary is missing.
        """
        self.ports = ports
        make = partial(NativeProcess, environment=client_environment(settings), on_line=on_line)
        self.client = make(
            client_argv(ports, settings, master_address or ports.master_address), address=ports.client_address
        )
        self.master = None
        if master_address is None:
            self.master = make(master_argv(ports, settings), address=ports.master_address)

    @property
    def all(self) -> tuple[NativeProcess, ...]:
        """In the order in which they are started."""
        return (self.client,) if self.master is None else (self.master, self.client)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of those that run."""
        return tuple(pid for process in self.all if (pid := process.pid) is not None)

    def start(self, timeout_s: float = 30.0) -> None:
        """Returns once both answer. StoreUnavailable where one does not; then neither runs."""
        try:
            for process in self.all:
                process.start()
                process.wait_until_it_answers(timeout_s)
        except StoreUnavailable:
            self.stop()
            raise

    def stop(self, timeout_s: float = 5.0) -> None:
        """May be called again."""
        for process in reversed(self.all):
            process.stop(timeout_s)


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
