"""The transport over Mooncake's Transfer Engine: one-sided TCP writes into a peer's slab.

One of two imports of mooncake; the other is `kv.store.mooncake.library`.

What the library does, as measured with 0.3.13.post1, shapes this file:
- It listens on all interfaces, without authentication, whatever `host` says: whoever reaches its ports can write into
  and read from registered slabs. Run it on a network of its own.
- Waiting for a batch spins a core, so each copy is submitted alone and polled with sleeps, which is as fast with half
  the CPU time: GB/s on loopback and seconds of CPU per GB, spinning against polling, were 2.8 and 0.30 against 3.5 and
  0.20 for 512 copies of 64 KiB, 3.7 and 0.23 against 4.9 and 0.13 for 64 of 1 MiB, 3.3 and 0.21 against 5.2 and 0.10
  for 4 of 16 MiB. One copy of 64 KiB alone takes 0.16 ms, not 0.02.
- A batch of several copies is done, says `transfer_check_status`, when its first one is: another reason for one each.
- It ignores a range of ports that it does not like without a word, and listens elsewhere.
- A polled write to a stopped peer never times out, so the limit is kept here, and such a write is remembered, since it
  may still land. The first call to a stopped peer blocks for 60 s, and all other transfers with it: it is not made
  before the peer has answered.
- A submitted write does not check its local range, and a failed one does not tell why: both are found out here.
- Calls before `initialize` crash the process: only `start`, which has initialised it, makes a transport.
Reads and RDMA devices are not used. Writes are not fenced (see `kv.transfer`).
Source: Mooncake (Qin et al. 2025, FAST), https://github.com/kvcache-ai/Mooncake.
"""

import contextlib
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from moonshard.kv.native_stderr import stderr_without
from moonshard.kv.publishing import Publishing, closed
from moonshard.kv.slab import Slab
from moonshard.kv.transfer import (
    Copies,
    FailureCause,
    PublishResult,
    TransferFailed,
    TransportCounters,
    TransportUnavailable,
    registered_bytes,
)

FIRST_PAUSE_S = 1e-4
LONGEST_PAUSE_S = 2e-3
PROBE_TIMEOUT_S = 1.0
LIBRARY_MIN_TIMEOUT_S = 5
NUM_PORTS = 2  # that one process listens at
PORTS_REST_S = 75.0  # Linux remembers a closed connection for 60 s
PORTS_PAUSE_S = 1.0

LOGGED_WHERE_ALL_IS_WELL = (  # at every start
    "Logging before InitGoogleLogging() is written to STDERR",
    "Local segment descriptor not found",
)

INSTALL = (
    "Mooncake cannot be loaded ({error}). It needs the system library libibverbs1 (apt-get install libibverbs1) and "
    "the package mooncake-transfer-engine-non-cuda, or mooncake-transfer-engine on a GPU machine"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MooncakeConfig:
    """Limits of one transport. What the library is told is read when it loads: once per process."""

    timeout_s: float = 5.0  # without any copy of a publish landing
    slice_bytes: int = 1024 * 1024  # of one socket write; the library's own 64 KiB is slower from 1 MiB on
    ports: tuple[int, int] | None = None  # first and last that the handshake may listen at
    max_bytes_in_flight: int = 64 * 1024 * 1024  # per publish; a longer copy goes alone
    max_copies_in_flight: int = 256  # per publish


@runtime_checkable
class _TransferEngine(Protocol):
    """What is used of mooncake.engine.TransferEngine; addresses are plain integers."""

    def initialize(self, host: str, metadata: str, protocol: str, devices: str, /) -> int: ...
    def get_rpc_port(self) -> int: ...
    def register_memory(self, address: int, num_bytes: int, /) -> int: ...
    def transfer_submit_write(self, session: str, local: int, remote: int, num_bytes: int, /) -> int: ...
    def batch_transfer_sync_write(
        self, session: str, local: list[int], remote: list[int], num_bytes: list[int], /
    ) -> int: ...
    def transfer_check_status(self, batch: int, /) -> int: ...


class MooncakeTransport:
    """One end; made by `start` alone, which blocks for as long as the library loads."""

    def __init__(self, engine: _TransferEngine, host: str, config: MooncakeConfig):
        self.session = f"{host}:{engine.get_rpc_port()}"
        self._engine = engine
        self._config = config
        self._slabs: list[Slab] = []
        self._publishing = Publishing("mooncake-publish")
        self._reached: set[str] = set()
        self._lock = threading.Lock()  # of the one below
        self._stragglers: list[int] = []  # given up, not finished

    @classmethod
    def start(cls, host: str, *, config: MooncakeConfig) -> "MooncakeTransport":
        """Starts the library. `host` is the name that peers find this machine by.

        Blocks for a minute at most where `config.ports` are those of a process that was just killed. Raises
        `TransportUnavailable` where it cannot be loaded or does not start.
        """
        os.environ.update(_library_environment(config))
        with stderr_without(LOGGED_WHERE_ALL_IS_WELL):
            engine = _initialized(host, config)
            _check_port(engine.get_rpc_port(), config.ports)
        return cls(engine, host, config)

    @property
    def counters(self) -> TransportCounters:
        return self._publishing.counters

    def num_stragglers(self) -> int:
        """Writes that were given up and may still land."""
        with self._lock:
            self._stragglers = [batch for batch in self._stragglers if self._engine.transfer_check_status(batch) == 0]
            return len(self._stragglers)

    def register(self, slab: Slab) -> None:
        """See `Transport`. Fails with `bad_range` for a slab that is registered already."""
        if self._publishing.closing.is_set():
            raise closed("register", may_still_land=False)
        code = self._engine.register_memory(slab.address, slab.num_bytes)
        if code != 0:
            detail = f"register_memory returned {code}"
            raise TransferFailed(FailureCause.BAD_RANGE, detail, may_still_land=False)
        self._slabs.append(slab)

    def publish(self, target_session: str, copies: Copies) -> Future[PublishResult]:
        """See `Transport`."""
        return self._publishing.begin(copies, lambda copies: self._publish(target_session, copies))

    def close(self) -> None:
        """See `Transport`. The library keeps listening, and slabs stay alive, as long as this object does."""
        self._publishing.close()

    def _publish(self, session: str, copies: Copies) -> None:
        for local, _, num_bytes in copies.rows():
            registered_bytes(self._slabs, local, num_bytes)  # the library would not check it
        self._reach(session)
        self._write(session, copies)

    def _reach(self, session: str) -> None:
        """Opens the peer in the library once it has answered: a silent peer would block all transfers."""
        if session in self._reached:
            return
        try:
            await_answer(session, self._config.timeout_s)
        except TimeoutError as error:
            detail = f"{session} does not answer"
            raise TransferFailed(FailureCause.TIMED_OUT, detail, may_still_land=False) from error
        except OSError as error:
            raise TransferFailed(FailureCause.REFUSED, f"{session}: {error}", may_still_land=False) from error
        self._settle(session, self._submit(session, 0, 0, 0))
        self._reached.add(session)

    def _write(self, session: str, copies: Copies) -> None:
        in_flight: deque[tuple[int, int]] = deque()  # (batch, bytes), oldest first
        num_bytes_in_flight = 0
        try:
            for local, remote, num_bytes in copies.rows():
                while in_flight and not self._has_room(len(in_flight), num_bytes_in_flight + num_bytes):
                    num_bytes_in_flight -= self._settle_oldest(session, in_flight)
                in_flight.append((self._submit(session, local, remote, num_bytes), num_bytes))
                num_bytes_in_flight += num_bytes
            while in_flight:
                self._settle_oldest(session, in_flight)
        except TransferFailed:
            with self._lock:
                self._stragglers.extend(batch for batch, _ in in_flight)
            raise

    def _has_room(self, num_copies: int, num_bytes: int) -> bool:
        return num_copies < self._config.max_copies_in_flight and num_bytes <= self._config.max_bytes_in_flight

    def _submit(self, session: str, local: int, remote: int, num_bytes: int) -> int:
        batch = self._engine.transfer_submit_write(session, local, remote, num_bytes)
        if batch == 0:
            raise TransferFailed(FailureCause.REFUSED, session, may_still_land=True)
        return batch

    def _settle_oldest(self, session: str, in_flight: deque[tuple[int, int]]) -> int:
        """Waits for one copy and returns its bytes. A batch must never be asked about again once it has settled."""
        batch, num_bytes = in_flight[0]
        status = self._settle(session, batch)
        in_flight.popleft()
        if status != 1:
            raise _failure(status, session)
        return num_bytes

    def _settle(self, session: str, batch: int) -> int:
        """The library's last word on a batch, asked for ever less often until `timeout_s` are over."""
        deadline_s = time.perf_counter() + self._config.timeout_s
        pause_s = FIRST_PAUSE_S
        while (status := self._engine.transfer_check_status(batch)) == 0:
            if self._publishing.closing.wait(pause_s):
                raise closed("publish", may_still_land=True)
            if time.perf_counter() > deadline_s:
                detail = f"{session}: nothing landed for {self._config.timeout_s:g} s"
                raise TransferFailed(FailureCause.TIMED_OUT, detail, may_still_land=True)
            pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
        return status


def start_bare(host: str, slab: Slab) -> Callable[[str, list[int], list[int], list[int]], None]:
    """The library's own batch write (session, local addresses, remote addresses, bytes): what ours is measured against.

    Blocks, spinning, and checks nothing. Call it in a process whose `start` has set the library's settings.
    """
    engine = _load_engine()
    engine.initialize(host, "P2PHANDSHAKE", "tcp", "")
    engine.register_memory(slab.address, slab.num_bytes)

    def write(session: str, local: list[int], remote: list[int], num_bytes: list[int]) -> None:
        code = engine.batch_transfer_sync_write(session, local, remote, num_bytes)
        if code != 0:
            raise TransferFailed(FailureCause.PEER_GONE, f"{session}: {code}", may_still_land=True)

    return write


def _initialized(host: str, config: MooncakeConfig) -> _TransferEngine:
    """The library, started. It takes no port whose last connections the system still remembers: that is awaited."""
    deadline_s = time.perf_counter() + PORTS_REST_S
    while True:
        engine = _load_engine()
        code = engine.initialize(host, "P2PHANDSHAKE", "tcp", "")
        if code == 0:
            return engine
        if config.ports is None:
            raise TransportUnavailable(f"Mooncake does not start on {host}: initialize returned {code}")
        first, last = config.ports
        if not has_unheard_ports(first, last) or time.perf_counter() > deadline_s:
            raise TransportUnavailable(
                f"Mooncake does not start on {host}: initialize returned {code}; "
                f"are {NUM_PORTS} ports from {first} to {last} free?"
            )
        time.sleep(PORTS_PAUSE_S)


def has_unheard_ports(first: int, last: int) -> bool:
    """Whether enough of these ports for one process have no listener; they may still not be free to bind."""
    num_unheard = 0
    for port in range(first, last + 1):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            num_unheard += 1
        if num_unheard == NUM_PORTS:
            return True
    return False


def _check_port(port: int, ports: tuple[int, int] | None) -> None:
    """Raises where the library listens outside the range that it was given, which it does without a word."""
    if ports is not None and not ports[0] <= port <= ports[1]:
        raise TransportUnavailable(
            f"Mooncake passed over the ports {ports[0]} to {ports[1]} and listens at {port}: it wants a range that "
            "begins at 1024 or above, ends at 65535 or below, and is clear of net.ipv4.ip_local_port_range"
        )


def _load_engine() -> _TransferEngine:
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise TransportUnavailable(INSTALL.format(error=error)) from error
    return TransferEngine()


def _library_environment(config: MooncakeConfig) -> dict[str, str]:
    """The library takes its settings from the environment alone."""
    settings = {
        "MC_LOG_LEVEL": "ERROR",
        "MC_TRANSFER_TIMEOUT": str(max(LIBRARY_MIN_TIMEOUT_S, math.ceil(config.timeout_s))),
        "MC_TCP_SLICE_SIZE": str(config.slice_bytes),
    }
    return settings | ports_environment(config.ports)


def ports_environment(ports: tuple[int, int] | None) -> dict[str, str]:
    """What keeps the library to a range of ports, first and last."""
    return {} if ports is None else {"MC_MIN_PRC_PORT": str(ports[0]), "MC_MAX_PRC_PORT": str(ports[1])}


def _failure(status: int, session: str) -> TransferFailed:
    """The library says -2 for a timeout and -1 for all else. A peer that still answers has turned the range down."""
    if status == -2:
        return TransferFailed(FailureCause.TIMED_OUT, session, may_still_land=True)
    try:
        await_answer(session, PROBE_TIMEOUT_S)
    except OSError as error:
        return TransferFailed(FailureCause.PEER_GONE, f"{session}: {error}", may_still_land=True)
    detail = f"{session} has not registered the range"
    return TransferFailed(FailureCause.BAD_RANGE, detail, may_still_land=True)


def await_answer(session: str, timeout_s: float) -> None:
    """Returns once the peer closes a connection on which nothing was sent: a stopped process never does.

    The library's own `send_probe` takes 60 s for that. Raises OSError (TimeoutError is a subclass).
    """
    host, _, port = session.rpartition(":")
    try:
        host.encode("idna")  # as connecting does, where the error would be none of the system's
    except UnicodeError as error:
        raise OSError(f"{host!r} is no name of a host") from error
    if not (port.isascii() and port.isdigit() and int(port) < 65_536):
        raise OSError("not host:port")
    with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
