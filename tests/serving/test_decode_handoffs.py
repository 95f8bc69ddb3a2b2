"""Where a decode worker reserves, with an engine of which nothing is asked but how many run there."""

from typing import Any, cast

from moonshard.kv.blocks import BlockPool
from moonshard.kv.inproc import InprocNetwork, InprocTransport
from moonshard.kv.slab import Slab
from moonshard.models.spec import KvGroup
from moonshard.rpc import link_pb2
from moonshard.serving.decode_handoffs import DecodeHandoffConfig, DecodeHandoffs
from moonshard.serving.kv_endpoint import whole_blocks
from moonshard.serving.kv_plane import KvPlane
from moonshard.serving.request import Request

NUM_PARTITIONS = 4
BLOCK_SIZE = 16
GROUP = KvGroup(name="kv", kind="full", num_layers=1, num_features=2, dtype="float32")


class QuietEngine:
    num_blocks_due = 0

    def check(self, request: Request) -> None:
        pass

    def num_sequences(self, partition: int) -> int:
        return 0

    def wake(self) -> None:
        pass


class Gateway:
    def __init__(self) -> None:
        self.heard: list[link_pb2.WorkerMessage] = []

    def send(self, message: link_pb2.WorkerMessage) -> None:
        self.heard.append(message)


def handoffs() -> DecodeHandoffs:
    layout = whole_blocks([GROUP], BLOCK_SIZE)
    slab = Slab(2 * NUM_PARTITIONS, GROUP.bytes_per_token * BLOCK_SIZE)
    plane = KvPlane(
        InprocTransport(InprocNetwork()), slab, name="inproc", layout=layout, fingerprint="", num_partitions=4
    )
    config = DecodeHandoffConfig(
        lease_s=20.0, quarantine_s=60.0, max_slots_per_handoff=2, max_queued=4, queue_timeout_s=20.0
    )
    return DecodeHandoffs(
        config,
        engine=cast(Any, QuietEngine()),
        pool=BlockPool(NUM_PARTITIONS, 4, BLOCK_SIZE),
        plane=plane,
        epoch=1,
        on_join=lambda handoff, link: None,
        on_fault=lambda error: None,
    )


def reserve(handoffs: DecodeHandoffs, number: int, gateway: Gateway) -> None:
    request = Request(id=bytes([number]) * 16, prompt=(0,), max_tokens=1)
    handoffs.reserve(link_pb2.Reserve(deadline_s=20.0), request, gateway)


def test_a_partition_whose_slots_are_in_quarantine_is_passed_over_for_one_that_has_some():
    decode, gateway = handoffs(), Gateway()
    for partition in range(NUM_PARTITIONS - 1):
        decode.slab.quarantine(partition, decode.slab.lease(partition, 2) or ())
    reserve(decode, 1, gateway)
    (said,) = gateway.heard
    assert said.target.partition == NUM_PARTITIONS - 1
    reserve(decode, 2, gateway)
    reserve(decode, 3, gateway)  # the control: now no partition has a slot
    assert len(gateway.heard) == 2
