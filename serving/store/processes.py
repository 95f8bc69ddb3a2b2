"""The native processes of Mooncake Store on one machine: how they are started, awaited and ended.

The master knows which blocks there are, who has them, and which are given up when memory is short. The client has the
memory, and beside the workers it outlives them. Both answer on loopback, and ask nobody who calls: another user of the
machine lists the names of blocks at the master's metrics, reads and removes blocks through the client, and joins the
master with memory of its own. The client also listens at two ports of all interfaces, for clients on other machines:
whoever reaches those can read and write the memory. No setting that was tried changes that: run it on a network of its
own. All are ports that can be fenced. The socket of workers' memory cannot, and asks nobody either: connections are
taken one after another, and one that is silent keeps the others waiting for 5 s; garbage is turned down with a line in
the log, and no block comes that way. In another network namespace it is not there.

Who starts them again when they end by themselves is the caller's to say. A client that comes back is empty, and
so is a master that comes back, though the client still has the memory.
Python needs none of the library's modules for this. What was measured is in `kv.store.mooncake`.
"""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moonshard.kv.mooncake import INSTALL, ports_environment
from moonshard.kv.store.mooncake.faults import StoreUnavailable
from moonshard.serving.config.loopback import LOOPBACK
from moonshard.serving.store.native import NativeProcess
from moonshard.serving.store.ports import StorePorts


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


def _binary(name: str) -> Path:
    package = importlib.util.find_spec("mooncake")
    if package is None or not package.submodule_search_locations:
        raise StoreUnavailable(INSTALL.format(error="there is no package mooncake"))
    path = Path(package.submodule_search_locations[0]) / name
    if not os.access(path, os.X_OK):
        raise StoreUnavailable(INSTALL.format(error=f"{path} is not there, or cannot be executed"))
    return path
