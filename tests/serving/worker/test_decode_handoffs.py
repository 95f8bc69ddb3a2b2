"""Where and when a decode worker reserves, with an engine of which nothing is asked but how many run there."""

import time
from typing import Any, cast

import pytest

from moonshard.kv.blocks import BlockPool
from moonshard.kv.inproc import InprocNetwork, InprocTransport
from moonshard.kv.prefix import PrefixCache
from moonshard.kv.slab import Slab
from moonshard.models.spec import KvGroup
from moonshard.rpc import link_pb2
from moonshard.serving.control.request import Request
from moonshard.serving.engine.slab_layout import slab_layout
from moonshard.serving.transfer.plane import KvPlane
from moonshard.serving.worker.decode import DecodeHandoffConfig, DecodeHandoffs
from moonshard.serving.worker.spans import WorkerSpans

NUM_PARTITIONS = 4
NUM_SPARE_SLOTS = 4
BLOCK_SIZE = 16
GROUP = KvGroup(name="kv", kind="full", num_layers=1, num_features=2, dtype="float32")


class QuietEngine:
    def __init__(self, num_spare_slots: int):
        self.spare_slots = num_spare_slots
        self.num_running = 0

    def check(self, request: Request, partition: int | None) -> None:
        pass

    def num_sequences(self, partition: int) -> int:
        return self.num_running

    def num_spare_slots(self, partition: int) -> int:
        return self.spare_slots

    def num_blocks_due(self, partition: int) -> int:
        return 0

    def wake(self) -> None:
        pass


class Gateway:
    def __init__(self) -> None:
        self.heard: list[link_pb2.WorkerMessage] = []

    def send(self, message: link_pb2.WorkerMessage) -> None:
        self.heard.append(message)


def handoffs(
    num_partitions: int = NUM_PARTITIONS, num_spare_slots: int = NUM_SPARE_SLOTS, queue_timeout_s: float = 20.0
) -> tuple[DecodeHandoffs, QuietEngine]:
    layout = slab_layout([GROUP], BLOCK_SIZE)
    slab = Slab(2 * NUM_PARTITIONS, GROUP.bytes_per_token * BLOCK_SIZE)
    plane = KvPlane(
        InprocTransport(InprocNetwork()),
        slab,
        name="inproc",
        layout=layout,
        fingerprint="",
        num_partitions=num_partitions,
    )
    config = DecodeHandoffConfig(
        lease_s=20.0, quarantine_s=60.0, max_cells_per_handoff=2, max_queued=4, queue_timeout_s=queue_timeout_s
    )
    engine = QuietEngine(num_spare_slots)
    pool = BlockPool(num_partitions, 4, BLOCK_SIZE)
    decode = DecodeHandoffs(
        config,
        engine=cast(Any, engine),
        pool=pool,
        cache=PrefixCache(pool),
        plane=plane,
        epoch=1,
        on_join=lambda handoff, link: None,
        spans=WorkerSpans(),
        on_fault=lambda error: None,
    )
    return decode, engine


def reserve(handoffs: DecodeHandoffs, number: int, gateway: Gateway, n: int = 1, partition: int | None = None) -> None:
    request = Request(id=bytes([number]) * 16, prompt=(0,), max_tokens=1, n=n)
    handoffs.reserve(
        link_pb2.Reserve(deadline_s=20.0, writer_epoch=b"p" * 16, run=link_pb2.Run(partition=partition)),
        request,
        gateway,
    )


def test_a_partition_whose_cells_are_in_quarantine_is_passed_over_for_one_that_has_some():
    (decode, _), gateway = handoffs(), Gateway()
    for partition in range(NUM_PARTITIONS - 1):
        decode.slab.quarantine(partition, decode.slab.lease(partition, 2) or ())
    reserve(decode, 1, gateway)
    (said,) = gateway.heard
    assert said.target.partition == NUM_PARTITIONS - 1
    reserve(decode, 2, gateway)
    reserve(decode, 3, gateway)  # the control: now no partition has a cell
    assert len(gateway.heard) == 2


def test_a_target_says_how_long_its_reservation_waited_for_room():
    (decode, engine), gateway = handoffs(1, num_spare_slots=1), Gateway()
    asked_s = time.perf_counter()
    reserve(decode, 1, gateway)
    engine.spare_slots = -1
    before_s = time.perf_counter()
    reserve(decode, 2, gateway)
    begun_s = time.perf_counter()
    assert what(gateway) == ["target"]
    time.sleep(0.02)
    engine.spare_slots, ended_s = 1, time.perf_counter()
    decode.tick()
    assert what(gateway) == ["target"] * 2
    at_once_ms, later_ms = (message.target.queue_ms for message in gateway.heard)
    assert 0 <= at_once_ms <= (before_s - asked_s) * 1e3
    assert (ended_s - begun_s) * 1e3 <= later_ms <= (time.perf_counter() - before_s) * 1e3


def test_of_those_without_a_cell_one_is_reserved_for_and_the_others_are_refused_in_time():
    (decode, _), gateway = handoffs(1, num_spare_slots=0, queue_timeout_s=1e-9), Gateway()
    for number in range(3):
        reserve(decode, number, gateway)
    assert what(gateway) == ["target"]
    decode.tick()
    assert what(gateway) == ["target", "failed", "failed"]
    assert all(message.failed.retry_after_s for message in gateway.heard[1:])


def test_who_waits_is_reserved_for_as_cells_come_free():
    (decode, engine), gateway = handoffs(1, num_spare_slots=0), Gateway()
    for number in range(4):
        reserve(decode, number, gateway)
    for num_free in range(4):
        engine.spare_slots = num_free
        decode.admit()
        assert what(gateway) == ["target"] * (1 + num_free)


def test_a_partition_whose_line_is_as_long_as_may_be_stops_nobody_in_another():
    (decode, _), gateway = handoffs(), Gateway()
    for number in range(2 + 4):  # two cells, and all that may wait
        reserve(decode, number, gateway, partition=0)
    reserve(decode, 6, gateway, partition=0)
    assert what(gateway) == ["target"] * 2 + ["failed"]
    reserve(decode, 7, gateway, partition=1)
    assert gateway.heard[-1].target.partition == 1


def test_every_choice_of_a_reservation_counts_as_one_that_needs_a_cell():
    (decode, _), gateway = handoffs(1, num_spare_slots=2), Gateway()
    reserve(decode, 1, gateway, n=3)
    reserve(decode, 2, gateway)
    assert what(gateway) == ["target"]
    decode.cancel(bytes([1]) * 16, gateway)
    assert what(gateway) == ["target"] * 2


@pytest.mark.parametrize("num_held", [0, 1, 2])
def test_what_is_known_needs_no_room_where_others_hold_it_too(num_held: int):
    """Of 4 blocks the prompt takes 3, which leaves 1 to grow into: known blocks that are free are taken like others."""
    (decode, engine), gateway, names = handoffs(1), Gateway(), (b"n0".ljust(16), b"n1".ljust(16))
    blocks = decode._pool.allocate(0, 2) or ()
    for block, name in zip(blocks, names, strict=True):
        decode._cache.note(0, block, name)
    decode._pool.release(0, blocks[num_held:][::-1])
    engine.num_running = 2
    request = Request(id=b"r" * 16, prompt=(0,) * 3 * BLOCK_SIZE, max_tokens=1, block_names=names)
    decode.reserve(link_pb2.Reserve(deadline_s=20.0, writer_epoch=b"p" * 16), request, gateway)
    assert what(gateway) == []
    engine.num_running = 1
    decode.admit()
    assert what(gateway) == ["target"]
    assert gateway.heard[0].target.num_blocks_held == 2


def what(gateway: Gateway) -> list[str | None]:
    return [message.WhichOneof("message") for message in gateway.heard]
