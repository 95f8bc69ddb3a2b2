"""GB/s of the KV transports between two processes on loopback, beside Mooncake used bare and a plain copy in memory.

Each way writes the same ranges into a slab of a second process (the in-process transport: of its own), in interleaved
rounds, so that what the machine does meanwhile falls on all of them. Run with `measure_transports`; the second process
is this module run as a script.
Networks, and several publishes at once, are not measured.
"""

import asyncio
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import numpy as np
import uvloop

from moonshard.kv.inproc import InprocNetwork, InprocTransport
from moonshard.kv.mooncake import MooncakeConfig, MooncakeTransport, start_bare
from moonshard.kv.slab import Slab
from moonshard.kv.transfer import Copies, Transport
from moonshard.rpc.server.server import build_server
from moonshard.serving.transfer.grpc_stream import SERVICE_NAME, GrpcTransport, KvStreamReceiver

MIB = 1024 * 1024
SIZES_BYTES = (MIB, 16 * MIB, 64 * MIB)
COPY_BYTES = (64 * 1024, 256 * 1024, MIB)
HOST = "127.0.0.1"
WAIT_S = 60.0

Way = Callable[[Sequence[tuple[int, int, int]]], None]  # writes (local offset, remote offset, bytes), and waits


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """One way's GB/s for publishes of `size_bytes` in ranges of `copy_bytes`, none adjoining another."""

    way: str
    size_bytes: int
    copy_bytes: int
    samples_gb_per_s: tuple[float, ...]

    @property
    def gb_per_s(self) -> float:
        return median(self.samples_gb_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivingProcess:
    """The second process, whose slab is written to."""

    mooncake_session: str
    grpc_session: str
    address: int
    key: str  # in hex


def measure_transports(
    *, sizes_bytes: Sequence[int] = SIZES_BYTES, copy_bytes: Sequence[int] = COPY_BYTES, rounds: int = 7
) -> list[Throughput]:
    """All ways, sizes and ranges. Raises TransportUnavailable where Mooncake does not load."""
    source = Slab(2, max(sizes_bytes))
    source.bytes[:] = np.random.default_rng(0).integers(0, 256, source.num_bytes, np.uint8)
    with _receiving(source.num_bytes) as receiver:
        ways = _ways(source, receiver)
        return [
            throughput
            for size in sizes_bytes
            for copy in copy_bytes
            for throughput in _measure(ways, size, min(copy, size), rounds)
        ]


def _measure(ways: dict[str, Way], size_bytes: int, copy_bytes: int, rounds: int) -> list[Throughput]:
    rows = [(2 * start, 2 * start, copy_bytes) for start in range(0, size_bytes, copy_bytes)]  # a gap after each
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, write in ways.items():
            start_s = time.perf_counter()
            write(rows)
            samples[name].append(size_bytes / (time.perf_counter() - start_s) / 1e9)
    return [
        Throughput(way=name, size_bytes=size_bytes, copy_bytes=copy_bytes, samples_gb_per_s=tuple(values[1:]))
        for name, values in samples.items()  # the first round warms up
    ]


def _ways(source: Slab, receiver: ReceivingProcess) -> dict[str, Way]:
    mooncake = MooncakeTransport.start(HOST, config=MooncakeConfig())
    mooncake.register(source)
    stream = GrpcTransport(KvStreamReceiver(), f"{HOST}:1", key=bytes.fromhex(receiver.key))
    stream.register(source)
    return {
        "memcpy": _memory_copies(source),
        "mooncake, bare": _bare(source, receiver),
        "mooncake": _through(mooncake, receiver.mooncake_session, source, receiver.address),
        "grpc": _through(stream, receiver.grpc_session, source, receiver.address),
        "inproc": _inproc(source),
    }


def _inproc(source: Slab) -> Way:
    """The in-process transport, which has both ends in this process."""
    network, target = InprocNetwork(), Slab(source.num_cells, source.cell_bytes)
    target.bytes[:] = 1
    near, far = InprocTransport(network), InprocTransport(network)
    near.register(source)
    far.register(target)
    return _through(near, far.session, source, target.address)


def _memory_copies(source: Slab) -> Way:
    target = Slab(source.num_cells, source.cell_bytes)
    target.bytes[:] = 1  # its pages are there before they are measured

    def write(rows: Sequence[tuple[int, int, int]]) -> None:
        for local, remote, num_bytes in rows:
            target.bytes[remote : remote + num_bytes] = source.bytes[local : local + num_bytes]

    return write


def _bare(source: Slab, receiver: ReceivingProcess) -> Way:
    """The library's own batch call, which blocks and spins."""
    write_batch = start_bare(HOST, source)

    def write(rows: Sequence[tuple[int, int, int]]) -> None:
        local, remote, num_bytes = (list(column) for column in zip(*rows, strict=True))
        write_batch(
            receiver.mooncake_session,
            [source.address + offset for offset in local],
            [receiver.address + offset for offset in remote],
            num_bytes,
        )

    return write


def _through(transport: Transport, session: str, source: Slab, target_address: int) -> Way:
    def write(rows: Sequence[tuple[int, int, int]]) -> None:
        local, remote, num_bytes = np.array(rows, np.int64).T
        copies = Copies(
            local_addresses=local + source.address, remote_addresses=remote + target_address, num_bytes=num_bytes
        )
        transport.publish(session, copies).result(timeout=WAIT_S)

    return write


@contextmanager
def _receiving(num_bytes: int) -> Iterator[ReceivingProcess]:
    command = [sys.executable, "-m", "moonshard.experiments.bench.transfer.transports", str(num_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield ReceivingProcess(**json.loads(process.stdout.readline()))
        finally:
            process.terminate()


async def _receive(num_bytes: int) -> None:
    """The second process: one slab that both transports write into, until stdin ends."""
    slab, receiver = Slab(1, num_bytes), KvStreamReceiver()
    slab.bytes[:] = 1
    key = secrets.token_bytes(32)
    server = build_server(host=HOST, port=0, add_servicers=[receiver.add_to], service_names=[SERVICE_NAME], key=key)
    await server.start()
    stream = GrpcTransport(receiver, f"{HOST}:{server.port}", key=key)
    mooncake = MooncakeTransport.start(HOST, config=MooncakeConfig())
    for transport in (stream, mooncake):
        transport.register(slab)
    where = {
        "mooncake_session": mooncake.session,
        "grpc_session": stream.session,
        "address": slab.address,
        "key": key.hex(),
    }
    print(json.dumps(where), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(_receive(int(sys.argv[1])))
