"""The gRPC transport for real: this process writes into another one's slab, and the other is stopped and killed."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from pathlib import Path

import grpc
import numpy as np
import pytest

from moonshard.kv.slab import Slab
from moonshard.kv.transfer import Copies, FailureCause, PublishResult, TransferFailed, Transport
from moonshard.rpc import kv_write, link_pb2
from moonshard.rpc.server.server import build_server
from moonshard.rpc.status import RequestError
from moonshard.rpc.tls import channel_credentials
from moonshard.serving.transfer.grpc_stream import MESSAGE_BYTES, SERVICE_NAME, WRITE, GrpcTransport, KvStreamReceiver
from tests.asked_process import AskedProcess
from tests.certificates import needs_openssl, self_signed
from tests.dialling import own_key
from tests.serving.worker.hostile_frames import frames

pytestmark = pytest.mark.xdist_group("cluster")

SLAB_BYTES = 24 * MESSAGE_BYTES
PEER = Path(__file__).with_name("kv_stream_peer.py")
LONG_S = 60.0  # a limit that no test waits for: what ends sooner was not ended by it


class RemotePeer(AskedProcess):
    """The other process."""

    def __init__(self, port: int = 0, tls_folder: Path | str = ""):
        super().__init__([str(PEER), str(SLAB_BYTES), str(port), str(tls_folder), own_key().proofs.hex()])
        self.session, self.address = self.ask("where")
        self.port = int(self.session.split("/")[2].rpartition(":")[2])


class Sender:
    """This process's end, which nobody writes to: it needs no server."""

    def __init__(self, timeout_s: float = LONG_S, ca: Path | None = None, key: bytes | None = None):
        self.slab = Slab(1, SLAB_BYTES)
        self.slab.bytes[:] = np.random.default_rng(1).integers(0, 256, SLAB_BYTES, np.uint8)
        self.transport: Transport = GrpcTransport(
            KvStreamReceiver(),
            "127.0.0.1:1",
            key=key or own_key().proofs,
            timeout_s=timeout_s,
            credentials=channel_credentials(root_ca=ca) if ca else None,
        )
        self.transport.register(self.slab)

    def begin(self, peer: RemotePeer, *rows: tuple[int, int, int], session: str | None = None) -> Future[PublishResult]:
        """Rows of (offset here, offset there, bytes)."""
        local, remote, num_bytes = np.array(rows, np.int64).T
        copies = Copies(
            local_addresses=local + self.slab.address, remote_addresses=remote + peer.address, num_bytes=num_bytes
        )
        return self.transport.publish(session or peer.session, copies)

    def publish(self, peer: RemotePeer, *rows: tuple[int, int, int]) -> PublishResult:
        return self.begin(peer, *rows).result(timeout=30)

    def failure(self, peer: RemotePeer, *rows: tuple[int, int, int], session: str | None = None) -> TransferFailed:
        return failure_of(self.begin(peer, *rows, session=session))


def failure_of(future: Future[PublishResult]) -> TransferFailed:
    with pytest.raises(TransferFailed) as failed:
        future.result(timeout=30)
    return failed.value


def outcome(failure: TransferFailed) -> tuple[FailureCause, bool]:
    return failure.cause, failure.may_still_land


def digest(data: np.ndarray) -> str:
    return hashlib.sha256(data.tobytes()).hexdigest()


@pytest.fixture
def peer() -> Iterator[RemotePeer]:
    peer = RemotePeer()
    yield peer
    peer.kill()


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = Sender()
    yield sender
    sender.transport.close()


@pytest.fixture
def impatient() -> Iterator[Sender]:
    sender = Sender(timeout_s=1.0)
    yield sender
    sender.transport.close()


def test_bytes_of_any_size_and_alignment_arrive_equal_and_are_counted(sender: Sender, peer: RemotePeer):
    expected = np.zeros(SLAB_BYTES, np.uint8)
    sizes = (1, 15, 127, 128, 4097, 16_384, MESSAGE_BYTES, MESSAGE_BYTES + 1, 3 * MESSAGE_BYTES - 1)
    for num_bytes in sizes:
        local, remote = num_bytes % 13, num_bytes % 1021
        result = sender.publish(peer, (local, remote, num_bytes))
        expected[remote : remote + num_bytes] = sender.slab.bytes[local : local + num_bytes]
        assert (result.num_bytes, result.num_transfers) == (num_bytes, 1)
        assert peer.ask("digest") == digest(expected)
    counters = sender.transport.counters
    assert (counters.num_bytes, counters.num_transfers, counters.num_failures) == (sum(sizes), len(sizes), {})


def test_many_copies_in_one_publish_all_arrive(sender: Sender, peer: RemotePeer):
    rng = np.random.default_rng(2)
    ends = np.sort(rng.choice(np.arange(1, SLAB_BYTES), 100, replace=False))
    rows = [(int(a), int(a), int(b - a)) for a, b in zip([0, *ends], [*ends, SLAB_BYTES], strict=True)]
    result = sender.publish(peer, *rows[::-1])
    assert (result.num_bytes, result.num_transfers) == (SLAB_BYTES, 101)
    assert peer.ask("digest") == digest(sender.slab.bytes)


def test_what_was_meant_for_a_former_process_at_the_address_is_turned_away(sender: Sender, peer: RemotePeer):
    sender.publish(peer, (0, 0, 8))
    peer.kill()
    successor = RemotePeer(port=peer.port)
    peer.address, before = successor.address, successor.ask("digest")
    assert outcome(sender.failure(peer, (0, 0, MESSAGE_BYTES))) == (FailureCause.REFUSED, False)
    assert successor.ask("digest") == before
    sender.publish(successor, (0, 0, SLAB_BYTES))
    assert successor.ask("digest") == digest(sender.slab.bytes)
    successor.kill()


@pytest.mark.parametrize(
    ("remote", "num_bytes"),
    [
        (SLAB_BYTES - 7, 8),
        (-8, 8),
        (-1, SLAB_BYTES),
        (SLAB_BYTES - 2 * MESSAGE_BYTES, 3 * MESSAGE_BYTES),
        (-MESSAGE_BYTES, 3 * MESSAGE_BYTES),
    ],
)
def test_of_a_copy_that_leaves_the_slab_there_not_a_byte_is_written(
    sender: Sender, peer: RemotePeer, remote: int, num_bytes: int
):
    sender.publish(peer, (5, 0, 100))
    before = peer.ask("digest")
    assert outcome(sender.failure(peer, (0, remote, num_bytes))) == (FailureCause.BAD_RANGE, False)
    assert peer.ask("digest") == before
    assert sender.transport.counters.num_failures == {FailureCause.BAD_RANGE: 1}
    sender.publish(peer, (0, 0, 8))


@pytest.mark.parametrize("local", [-8, SLAB_BYTES - 7])
def test_a_range_that_is_not_registered_here_stays_here(sender: Sender, peer: RemotePeer, local: int):
    before = peer.ask("digest")
    failure = sender.failure(peer, (0, 0, 100), (local, 0, 8))
    assert outcome(failure) == (FailureCause.BAD_RANGE, False)
    assert peer.ask("digest") == before


async def test_an_end_announced_for_one_copy_does_not_hold_for_the_next(sender: Sender):
    receiver = KvStreamReceiver()
    server = build_server(
        host="127.0.0.1", port=0, add_servicers=[receiver.add_to], service_names=[SERVICE_NAME], key=own_key().proofs
    )
    await server.start()
    end = GrpcTransport(receiver, f"127.0.0.1:{server.port}", key=own_key().proofs)
    low, high = sorted((Slab(1, 3 * MESSAGE_BYTES) for _ in range(2)), key=lambda slab: slab.address)
    end.register(low)
    end.register(high)
    copies = Copies(
        local_addresses=np.array([sender.slab.address] * 2),
        remote_addresses=np.array([high.address, low.address]),
        num_bytes=np.array([high.num_bytes, 8]),
    )
    await asyncio.wrap_future(sender.transport.publish(end.session, copies))
    assert high.bytes.tobytes() == sender.slab.bytes[: high.num_bytes].tobytes()
    assert low.bytes[:9].tolist() == [*sender.slab.bytes[:8].tolist(), 0]
    end.close()
    await server.stop(0)


def test_a_closed_port_refuses_long_before_the_limit(sender: Sender, peer: RemotePeer):
    peer.kill()
    assert outcome(sender.failure(peer, (0, 0, MESSAGE_BYTES))) == (FailureCause.REFUSED, False)


@pytest.mark.parametrize("session", ["", "grpc://", "127.0.0.1:15001", "grpc://127.0.0.1/" + 32 * "0", "grpc://h:1/x"])
def test_what_is_no_session_is_refused(sender: Sender, peer: RemotePeer, session: str):
    failure = failure_of(sender.transport.publish(session, one_byte(sender, peer)))
    assert outcome(failure) == (FailureCause.REFUSED, False)
    assert "is no session" in str(failure)


def one_byte(sender: Sender, peer: RemotePeer) -> Copies:
    here, there = np.array([sender.slab.address]), np.array([peer.address])
    return Copies(local_addresses=here, remote_addresses=there, num_bytes=np.array([1]))


def test_a_peer_killed_in_the_middle_is_gone(sender: Sender, peer: RemotePeer):
    peer.ask("stop_after", 3)
    future = sender.begin(peer, (0, 0, SLAB_BYTES))
    peer.wait_stopped()
    assert not future.done()
    peer.kill()
    assert outcome(failure_of(future)) == (FailureCause.PEER_GONE, True)


def test_a_peer_stopped_in_the_middle_times_out_and_delays_nobody_else(impatient: Sender, peer: RemotePeer):
    other = RemotePeer()
    impatient.publish(other, (0, 0, 8))
    peer.ask("stop_after", 3)
    start_s = time.perf_counter()
    hung = impatient.begin(peer, (0, 0, SLAB_BYTES))
    peer.wait_stopped()
    impatient.publish(other, (0, 0, SLAB_BYTES))
    assert outcome(failure_of(hung)) == (FailureCause.TIMED_OUT, True)
    assert time.perf_counter() - start_s > 1.0
    peer.go_on()
    peer.ask("stop_after", -1)
    impatient.publish(peer, (0, 0, SLAB_BYTES))
    assert peer.ask("digest") == digest(impatient.slab.bytes)
    other.kill()


def test_a_stopped_peer_that_was_never_reached_times_out_with_nothing_sent(impatient: Sender, peer: RemotePeer):
    peer.stop()
    assert outcome(impatient.failure(peer, (0, 0, 8))) == (FailureCause.TIMED_OUT, False)
    peer.go_on()
    impatient.publish(peer, (0, 0, 8))


def test_close_fails_what_is_under_way_and_may_be_called_again(sender: Sender, peer: RemotePeer):
    peer.ask("stop_after", 1)
    future = sender.begin(peer, (0, 0, SLAB_BYTES))
    peer.wait_stopped()
    sender.transport.close()
    sender.transport.close()
    assert future.done()
    assert outcome(failure_of(future)) == (FailureCause.CLOSED, True)
    assert outcome(sender.failure(peer, (0, 0, 8))) == (FailureCause.CLOSED, False)
    with pytest.raises(TransferFailed, match="closed"):
        sender.transport.register(Slab(1, 8))


def test_a_closed_receiver_refuses(sender: Sender, peer: RemotePeer):
    sender.publish(peer, (0, 0, 8))
    peer.ask("close")
    before = peer.ask("digest")
    assert outcome(sender.failure(peer, (0, 0, MESSAGE_BYTES))) == (FailureCause.REFUSED, False)
    assert peer.ask("digest") == before


def test_a_sender_with_another_key_is_refused_and_sends_nothing(peer: RemotePeer):
    before, stranger = peer.ask("digest"), Sender(key=bytes(32))
    failure = stranger.failure(peer, (0, 0, MESSAGE_BYTES))
    assert outcome(failure) == (FailureCause.REFUSED, False)
    assert "cluster.key_file" in str(failure)
    assert peer.ask("digest") == before
    stranger.transport.close()


def test_writes_without_a_proof_change_nothing(sender: Sender, peer: RemotePeer):
    before = peer.ask("digest")
    with grpc.insecure_channel(f"127.0.0.1:{peer.port}") as channel:
        write = channel.stream_unary(WRITE)
        named = link_pb2.KvWrite(session=peer.session).SerializeToString()
        with pytest.raises(grpc.RpcError) as refused:
            write(iter([named, kv_write.encode(peer.address, memoryview(b"stranger"))]), timeout=20)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert peer.ask("digest") == before
    sender.publish(peer, (0, 0, 8))


async def test_no_message_with_a_field_spoilt_ends_otherwise_than_written_or_refused():
    receiver, slab = KvStreamReceiver(), Slab(3, 4096)
    receiver.slabs.append(slab)
    first = link_pb2.KvWrite(session=f"grpc://127.0.0.1:1/{receiver.id}")
    announced = link_pb2.KvWrite(address=slab.cell_address(2))
    write = link_pb2.KvWrite(address=slab.cell_address(1), data=b"x" * 4096)
    valid, num_refused = [first, announced, write], 0
    for index, message in enumerate(valid):
        for spoilt in [*frames(message), b"\xff" * 9, b""]:
            said = [*valid[:index], spoilt, *valid[index + 1 :]]
            sent = iter([one if isinstance(one, bytes) else one.SerializeToString() for one in said])

            async def messages(sent: Iterator[bytes] = sent) -> AsyncIterator[bytes]:
                for one in sent:
                    yield one

            try:
                await receiver._receive(messages())
            except RequestError:
                num_refused += 1
    assert num_refused > 20
    assert not slab.cell(0).any()  # where none of them points to


def test_two_receivers_never_share_a_session():
    assert KvStreamReceiver().id != KvStreamReceiver().id


@needs_openssl
def test_bytes_arrive_over_tls_and_a_sender_without_it_is_refused(sender: Sender, tmp_path: Path):
    cert, _ = self_signed(tmp_path, "peer")
    peer, trusting = RemotePeer(tls_folder=tmp_path), Sender(ca=cert)
    trusting.publish(peer, (0, 0, SLAB_BYTES))
    assert peer.ask("digest") == digest(trusting.slab.bytes)
    assert outcome(sender.failure(peer, (0, 0, 8))) == (FailureCause.REFUSED, False)
    trusting.transport.close()
    peer.kill()
