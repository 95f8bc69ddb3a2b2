"""To whom a session gives each message of its worker, while its link lives."""

import asyncio
from itertools import pairwise

import pytest

from moonshard.rpc import link_pb2
from moonshard.rpc.status import InvalidArgument, Unavailable
from moonshard.serving.gateway.workers.session import NUM_AT_A_TIME, WorkerSession

ID = b"r" * 16
Message = link_pb2.WorkerMessage


@pytest.fixture
def heard() -> list[link_pb2.WorkerMessage]:
    """What was said about handoffs."""
    return []


@pytest.fixture
def session(heard: list[link_pb2.WorkerMessage]) -> WorkerSession:
    welcome = link_pb2.Welcome(epoch=b"\x01" + b"\x02" * 15, role="decode")
    return WorkerSession(address="w:1", welcome=welcome, on_handoff=lambda _session, message: heard.append(message))


def test_an_epoch_is_the_same_number_wherever_it_is_said(session: WorkerSession):
    assert session.epoch == int.from_bytes(b"\x01" + b"\x02" * 15, "big")
    assert session.role == "decode"


def test_opening_an_inbox_says_nothing_to_the_worker(session: WorkerSession):
    inbox = session.open(ID)
    asyncio.run(session.deliver(link_pb2.StepOutput(outputs=[link_pb2.SequenceOutput(request_id=ID)])))
    assert len(inbox.take_nowait()) == 1
    assert session.outgoing.empty()


@pytest.mark.parametrize(
    "message",
    [
        Message(target=link_pb2.Target(handoff=ID)),
        Message(credits=link_pb2.Credits(handoff=ID)),
        Message(chunk=link_pb2.Manifest(handoff=ID)),
        Message(first_tokens=link_pb2.FirstTokens(handoff=ID)),
        Message(drained=link_pb2.Drained(handoff=ID)),
        Message(failed=link_pb2.Failed(request_id=ID, cause=link_pb2.HANDOFF_CAUSE_CORRUPT)),
    ],
)
def test_what_a_worker_says_of_a_handoff_goes_to_the_handoff_alone(
    session: WorkerSession, heard: list[link_pb2.WorkerMessage], message: link_pb2.WorkerMessage
):
    inbox = session.open(ID)
    session.receive(message)
    assert heard == [message]
    assert inbox.empty()


def test_a_failed_request_is_told_where_it_waits_and_a_refused_leg_where_its_handoff_is(
    session: WorkerSession, heard: list[link_pb2.WorkerMessage]
):
    failed = Message(failed=link_pb2.Failed(request_id=ID, code=3, message="no", field="n"))
    inbox = session.open(ID)
    session.receive(failed)
    with pytest.raises(InvalidArgument, match="no") as error:
        inbox.take_nowait()
    assert (error.value.message, error.value.field, heard) == ("no", "n", [])
    session.close(ID, cancel=False)
    session.receive(failed)
    assert heard == [failed]


def test_only_a_request_that_is_open_is_cancelled(session: WorkerSession):
    session.run(link_pb2.Run(request_id=ID))
    session.close(ID, cancel=True)
    session.close(ID, cancel=True)
    sent = [session.outgoing.get_nowait() for _ in range(session.outgoing.qsize())]
    assert [message.WhichOneof("message") for message in sent] == ["run", "cancel"]


def test_nothing_is_queued_for_a_session_that_is_lost(session: WorkerSession):
    inbox = session.open(ID)
    session.is_lost = True
    session.fail_all(Unavailable("gone"))
    with pytest.raises(Unavailable):
        inbox.take_nowait()
    session.send(link_pb2.GatewayMessage())
    assert session.outgoing.empty()


async def test_what_a_step_brings_is_not_all_of_a_turn():
    """While hundreds of streams get a token each, whoever else waits for this process gets its turns."""
    session = WorkerSession(address="w:1", welcome=link_pb2.Welcome(), on_handoff=lambda *_: None)
    ids = [b"%016d" % number for number in range(256)]
    inboxes = [session.open(request_id) for request_id in ids]
    outputs = [link_pb2.SequenceOutput(request_id=request_id) for request_id in ids]
    delivering = asyncio.create_task(session.deliver(link_pb2.StepOutput(outputs=outputs)))
    num_delivered = [0]
    while not delivering.done():
        await asyncio.sleep(0)
        num_delivered.append(sum(not inbox.empty() for inbox in inboxes))
    assert max(after - before for before, after in pairwise(num_delivered)) <= NUM_AT_A_TIME
    assert [len(inbox.take_nowait()) for inbox in inboxes] == [1] * len(ids)
