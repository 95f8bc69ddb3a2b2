"""What goes between the two workers of a handoff passes through the gateway as it came, known to it or not."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from moonshard.rpc import link_pb2
from moonshard.rpc.status import InvalidArgument
from moonshard.serving.gateway.pipeline.handoffs import Handoffs
from moonshard.serving.wire.handoffs import epoch_from

HANDOFF, PREFILL, DECODE = b"h" * 16, b"p" * 16, b"d" * 16
UNKNOWN = b"\xc2\x3e\x05later"  # field 1000, of a gateway that does not know it
GRANTS = [link_pb2.Grant(cell=cell, number=1 << 40) for cell in range(3)]


class Worker:
    """A worker's session that keeps what was sent to it."""

    def __init__(self, epoch: bytes):
        self.epoch = epoch_from(epoch)
        self.welcome = SimpleNamespace(endpoint=link_pb2.KvEndpoint(session="here"))
        self.sent: list[link_pb2.GatewayMessage] = []

    def send(self, message: link_pb2.GatewayMessage) -> None:
        self.sent.append(message)

    def open(self, request_id: bytes) -> asyncio.Queue[object]:
        return asyncio.Queue()


class Relay:
    """A handoff under way between two workers that send what a test says."""

    def __init__(self) -> None:
        self.prefill, self.decode = Worker(PREFILL), Worker(DECODE)
        workers = {worker.epoch: worker for worker in (self.prefill, self.decode)}
        dispatcher = SimpleNamespace(prefill_over=lambda _attempt: None)
        known: Any = SimpleNamespace(session_of=workers.get, sent=lambda _session, _leg: None, dispatcher=dispatcher)
        self.handoffs = Handoffs(known, lease_s=30.0)
        run = link_pb2.Run(request_id=HANDOFF, prompt_tokens=[1, 2], n=1, max_tokens=8)
        leg: Any = SimpleNamespace(epoch=self.prefill.epoch, home=SimpleNamespace(partition=1))
        attempt: Any = SimpleNamespace()
        decode: Any = self.decode
        log: Any = SimpleNamespace(append=lambda _event: None)
        self.handoffs.begin(run, log, attempt, leg, decode=decode)
        self.decode.sent.clear()

    def hear(self, worker: Worker, **message: Any) -> None:
        session: Any = worker
        self.handoffs.receive(session, link_pb2.WorkerMessage(**message))


def target(**fields: Any) -> link_pb2.Target:
    known = {"handoff": HANDOFF, "epoch": DECODE, "writer_epoch": PREFILL, "session": "here", "num_blocks": 3}
    return link_pb2.Target(**{**known, "grants": GRANTS, "lease_s": 30.0, **fields})


def credits(**fields: Any) -> link_pb2.Credits:
    return link_pb2.Credits(**{"handoff": HANDOFF, "target_epoch": DECODE, "grants": GRANTS, **fields})


def manifest(**fields: Any) -> link_pb2.Manifest:
    known = {"handoff": HANDOFF, "writer_epoch": PREFILL, "target_epoch": DECODE, "blocks": range(3)}
    return link_pb2.Manifest(**{**known, "grants": GRANTS, "checksums": [1, 2, 1 << 63], **fields})


def with_more[M: (link_pb2.Target, link_pb2.Credits, link_pb2.Manifest)](message: M) -> M:
    """A message from a worker that has fields which the gateway does not know."""
    return type(message).FromString(message.SerializeToString() + UNKNOWN)


async def test_what_two_workers_tell_each_other_passes_as_it_came():
    relay = Relay()
    said = [with_more(target()), with_more(credits()), with_more(manifest()), with_more(manifest(is_last=True))]
    relay.hear(relay.decode, target=said[0])
    relay.hear(relay.decode, credits=said[1])
    relay.hear(relay.prefill, chunk=said[2])
    first = link_pb2.SequenceOutput(request_id=HANDOFF, token_ids=[7])
    epochs = {"writer_epoch": PREFILL, "target_epoch": DECODE}
    relay.hear(relay.prefill, first_tokens=link_pb2.FirstTokens(handoff=HANDOFF, outputs=[first], **epochs))
    relay.hear(relay.prefill, chunk=said[3])
    (run, forwarded_credits), (landed, start) = relay.prefill.sent, relay.decode.sent
    heard = [run.run.target, forwarded_credits.credits, landed.landed, start.start.last]
    assert [message.SerializeToString() for message in heard] == [message.SerializeToString() for message in said]
    assert list(start.start.token_ids) == [7]


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("blocks", {"chunk": manifest(blocks=range(2))}),
        ("blocks", {"chunk": manifest(checksums=[])}),
        ("handoff", {"chunk": manifest(handoff=b"short")}),
        ("writer_epoch", {"chunk": manifest(writer_epoch=b"short")}),
        ("target_epoch", {"chunk": manifest(target_epoch=b"")}),
        ("handoff", {"credits": credits(handoff=b"")}),
        ("target_epoch", {"credits": credits(target_epoch=b"short")}),
        ("handoff", {"target": target(handoff=b"")}),
        ("epoch", {"target": target(epoch=b"short")}),
        ("writer_epoch", {"target": target(writer_epoch=b"")}),
    ],
)
async def test_what_cannot_be_true_is_the_fault_of_who_said_it_and_goes_no_further(field: str, message: dict[str, Any]):
    relay = Relay()
    if "target" not in message:
        relay.hear(relay.decode, target=target())
        relay.prefill.sent.clear()
    with pytest.raises(InvalidArgument) as caught:
        relay.hear(relay.prefill, **message)
    assert caught.value.field == field
    assert relay.prefill.sent == relay.decode.sent == []
