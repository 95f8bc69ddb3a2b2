"""What a decode worker says of its reservations on the wire, with an engine of which nothing is asked."""

import time
from typing import Any, cast

from moonshard.kv.blocks import BlockPool
from moonshard.kv.inproc import InprocNetwork, InprocTransport
from moonshard.kv.prefix import PrefixCache
from moonshard.kv.slab import Slab
from moonshard.models.spec import KvGroup
from moonshard.rpc import link_pb2
from moonshard.serving.control.request import Request
from moonshard.serving.engine.capacity.slab_layout import slab_layout
from moonshard.serving.transfer.plane import KvPlane
from moonshard.serving.worker.decode import DecodeHandoffConfig, DecodeHandoffs
from moonshard.serving.worker.spans import WorkerSpans

NUM_PARTITIONS = 4
NUM_SPARE_SLOTS = 4
BLOCK_SIZE = 16
GROUP = KvGroup(name="kv", layers=(0,), num_features=2, dtype="float32")


class Quiet:
    """The engine and its scheduler."""

    def __init__(self, num_spare_slots: int):
        self.spare_slots = num_spare_slots
        self.num_running = 0

    def check(self, request: Request, partition: int | None = None) -> None:
        pass

    def num_blocks_to_grow(self, partition: int) -> int:
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
) -> tuple[DecodeHandoffs, Quiet]:
    layout = slab_layout([GROUP], BLOCK_SIZE)
    slab = Slab(2 * NUM_PARTITIONS, GROUP.layer_bytes_per_token * BLOCK_SIZE)
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
    engine = Quiet(num_spare_slots)
    pool = BlockPool(num_partitions, 4, BLOCK_SIZE)
    decode = DecodeHandoffs(
        config,
        engine=cast(Any, engine),
        batch=engine,
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
        link_pb2.Reserve(
            lease_s=20.0, writer_epoch=b"p" * 16, run=link_pb2.Run(request_id=request.id, partition=partition)
        ),
        request,
        gateway,
    )


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


def test_what_is_said_over_another_link_is_answered_and_changes_nothing():
    (decode, _), gateway, other = handoffs(), Gateway(), Gateway()
    reserve(decode, 1, gateway)
    target = gateway.heard[0].target
    last = link_pb2.Manifest(
        handoff=target.handoff,
        writer_epoch=target.writer_epoch,
        target_epoch=target.epoch,
        blocks=[0],
        grants=target.grants[:1],
        checksums=[0],
        is_last=True,
    )
    decode.landed(last, other)
    decode.start(link_pb2.Start(handoff=target.handoff, token_ids=[7], last=last), other)
    assert [(said.failed.code, said.failed.field) for said in other.heard] == [(5, "handoff")] * 2
    decode.cancel(target.handoff, other)
    decode.close_link(other)
    assert decode.num_handoffs == 1
    decode.close_link(gateway)
    assert decode.num_handoffs == 0


def what(gateway: Gateway) -> list[str | None]:
    return [message.WhichOneof("message") for message in gateway.heard]
