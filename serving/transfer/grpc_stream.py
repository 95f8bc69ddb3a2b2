"""The KV transport over gRPC, `transport = "grpc"`: where Mooncake does not load, or the network asks for TLS.

A publish is one `KvStream.Write`; the worker's own server takes it in and writes into the slab. It is here and not in
`kv` because that knows no gRPC. Both ends of each prove that they are of the cluster (`rpc.server.door`). Sessions read
`grpc://host:port/<id>`, with an id that is drawn per `KvStreamReceiver`: a later process at that address turns away
what was meant for the former.

Measured on loopback with two cores, GB/s of 16 and 64 MiB in messages of 1 MiB: 1.3 and 1.6 where protobuf frames the
payload, 2.7 and 3.4 as `rpc.kv_write` does. At the sending end gRPC's threads and its asyncio calls were equally fast;
the threads leave the worker's event loop alone. The receiving loop was held up by 1.3 ms at most, and by 6 ms with
messages of 4 MiB.
A broken stream is not resumed, and nothing is fenced: what a stopped receiver has in its sockets lands when it goes on.
"""

import re
import secrets
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from typing import cast

import grpc

from moonshard.kv.publishing import Publishing, closed
from moonshard.kv.slab import Slab, find_slab
from moonshard.kv.transfer import (
    Copies,
    FailureCause,
    PublishResult,
    TransferFailed,
    TransportCounters,
    registered_bytes,
)
from moonshard.rpc import kv_write, link_pb2
from moonshard.rpc.server.door import Knock, ProvedFrames
from moonshard.rpc.status import InvalidArgument, NotFound, RequestError, abort

SERVICE_NAME = link_pb2.DESCRIPTOR.services_by_name["KvStream"].full_name
MESSAGE_BYTES = 1024 * 1024
WRITE = f"/{SERVICE_NAME}/Write"
SESSION = re.compile(r"grpc://([0-9A-Za-z.:_%\[\]-]{1,255}:([0-9]{1,5}))/([0-9a-f]{32})")

_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel fails for as long as a former one backs off
    ("grpc.enable_http_proxy", 0),
)
_REFUSALS = {
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
}


class KvStreamReceiver:
    """The receiving end, into which peers write. Made before the server that carries it: only the transport has to know
    that server's port.
    """

    def __init__(self):
        self.id = secrets.token_hex(16)
        self.slabs: list[Slab] = []
        self.is_closed = False

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serves `SERVICE_NAME`, taking its messages as bytes."""
        handler = grpc.stream_unary_rpc_method_handler(
            self._write, response_serializer=link_pb2.KvWritten.SerializeToString
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, {"Write": handler}),))

    async def _write(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> link_pb2.KvWritten:
        try:
            return link_pb2.KvWritten(num_bytes=await self._receive(messages))
        except RequestError as error:
            await abort(context, error)

    async def _receive(self, messages: AsyncIterator[bytes]) -> int:
        """A message without data says where the copy ends that begins with the next one, so that all of it is checked
        before any is written. A copy in one message needs none."""
        session, _, _ = kv_write.decode(await anext(messages, b""))
        self._check_session(session)
        num_bytes, end = 0, 0
        async for message in messages:
            self._check_session(session)  # it may have closed since
            _, address, data = kv_write.decode(message)
            if data:
                self._put(address, data, end)
                num_bytes, end = num_bytes + len(data), 0
            else:
                end = address
        return num_bytes

    def _check_session(self, session: str) -> None:
        if self.is_closed or session.rpartition("/")[2] != self.id:
            raise NotFound(f"no session {session!r} here", field="session")

    def _put(self, address: int, data: memoryview, end: int) -> None:
        num_bytes = max(address + len(data), end) - address
        slab = find_slab(self.slabs, address, num_bytes)
        if slab is None:
            raise InvalidArgument(f"{num_bytes} bytes at {address:#x} are in no registered slab", field="address")
        start = address - slab.address
        slab.bytes.data[start : start + len(data)] = data


class GrpcTransport:
    """One end. See `kv.transfer.Transport`."""

    def __init__(
        self,
        receiver: KvStreamReceiver,
        address: str,
        *,
        key: bytes,
        timeout_s: float = 5.0,
        credentials: grpc.ChannelCredentials | None = None,
    ):
        """`address` is the host:port under which peers find the server that carries `receiver`; all have the `key`.

        `timeout_s` is how long a publish may go on without the peer taking anything. `credentials` are those of
        all peers: with none, the bytes go in clear.
        """
        self.session = f"grpc://{address}/{receiver.id}"
        self._receiver = receiver
        self._key = key
        self._timeout_s = timeout_s
        self._credentials = credentials
        self._publishing = Publishing("kv-stream-publish")
        self._lock = threading.Lock()  # of the two below
        self._writes: dict[str, grpc.StreamUnaryMultiCallable] = {}  # by address; each keeps its channel open
        self._calls: set[grpc.Future] = set()

    @property
    def counters(self) -> TransportCounters:
        return self._publishing.counters

    def register(self, slab: Slab) -> None:
        if self._receiver.is_closed:
            raise closed("register", may_still_land=False)
        self._receiver.slabs.append(slab)

    def publish(self, target_session: str, copies: Copies) -> Future[PublishResult]:
        return self._publishing.begin(copies, lambda copies: self._publish(target_session, copies))

    def close(self) -> None:
        self._receiver.is_closed = True
        with self._lock:
            self._publishing.closing.set()
            calls = list(self._calls)
        for call in calls:
            call.cancel()
        self._publishing.close()
        with self._lock:
            self._writes.clear()

    def _publish(self, session: str, copies: Copies) -> None:
        match = SESSION.fullmatch(session)
        if match is None:
            raise TransferFailed(FailureCause.REFUSED, f"{session!r} is no session", may_still_land=False)
        address, outgoing = match[1], _Outgoing(session, self._receiver.slabs, copies)
        knock = Knock(self._key, WRITE, 0 if self._credentials else int(match[2]))
        frames = ProvedFrames(knock, outgoing)
        with self._lock:
            if self._publishing.closing.is_set():
                raise closed("publish", may_still_land=False)
            call = self._write_to(address).future(frames, metadata=knock.metadata)
            self._calls.add(call)
        frames.go(call)
        try:
            error = _await(call, frames, outgoing, self._timeout_s)
        finally:
            with self._lock:
                self._calls.discard(call)
        if error is not None:
            with self._lock:
                self._writes.pop(address, None)  # whoever listens there next gets a fresh connection, at once
            raise _failure(error, session, outgoing)

    def _write_to(self, address: str) -> grpc.StreamUnaryMultiCallable:
        if address not in self._writes:
            if self._credentials is None:
                channel = grpc.insecure_channel(address, _CHANNEL_OPTIONS)
            else:
                channel = grpc.secure_channel(address, self._credentials, _CHANNEL_OPTIONS)
            self._writes[address] = channel.stream_unary(WRITE)
        return self._writes[address]


class _Outgoing(Iterator[bytes]):
    """The messages of one publish. gRPC takes the next one when it has handed over the last."""

    def __init__(self, session: str, slabs: Sequence[Slab], copies: Copies):
        """Raises TransferFailed for a range that is in none of the slabs."""
        rows = [(registered_bytes(slabs, local, num_bytes).data, remote) for local, remote, num_bytes in copies.rows()]
        self._messages = _messages(session, rows)
        self._num_taken = 0
        self.taken_s = time.perf_counter()  # when the last one was

    @property
    def may_land(self) -> bool:
        """Whether more may have gone out than the first message, which only names the session."""
        return self._num_taken > 1

    def __next__(self) -> bytes:
        self.taken_s = time.perf_counter()
        self._num_taken += 1
        return next(self._messages)


def _messages(session: str, rows: Sequence[tuple[memoryview, int]]) -> Iterator[bytes]:
    """See `KvStreamReceiver` for the message that announces a copy's end."""
    yield link_pb2.KvWrite(session=session).SerializeToString()
    for data, address in rows:
        if len(data) > MESSAGE_BYTES:
            yield link_pb2.KvWrite(address=address + len(data)).SerializeToString()
        for start in range(0, len(data), MESSAGE_BYTES):
            yield kv_write.encode(address + start, data[start : start + MESSAGE_BYTES])


def _await(call: grpc.Future, frames: ProvedFrames, outgoing: _Outgoing, timeout_s: float) -> grpc.RpcError | None:
    """How the call ended: its error, or None.

    Raises TransferFailed where it does not end in time, or where `close`, or a server that proved nothing, had it
    cancelled.
    """
    while (left_s := outgoing.taken_s + timeout_s - time.perf_counter()) > 0:
        try:
            return cast(grpc.RpcError | None, call.exception(timeout=left_s))
        except grpc.FutureTimeoutError:
            continue  # unless more was taken meanwhile, the time is over
        except grpc.FutureCancelledError as error:
            if frames.fault is not None:
                raise TransferFailed(FailureCause.REFUSED, frames.fault.message, may_still_land=False) from error
            raise closed("publish", may_still_land=outgoing.may_land) from error
    call.cancel()
    detail = f"nothing was taken for {timeout_s:g} s"
    raise TransferFailed(FailureCause.TIMED_OUT, detail, may_still_land=outgoing.may_land)


def _failure(error: grpc.RpcError, session: str, outgoing: _Outgoing) -> TransferFailed:
    """What a failed call means: an answer of the peer is final; a connection that broke leaves open what had
    arrived.
    """
    code, detail = error.code(), f"{session}: {error.details()}"
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return TransferFailed(FailureCause.BAD_RANGE, detail, may_still_land=False)
    if code in _REFUSALS or not outgoing.may_land:
        return TransferFailed(FailureCause.REFUSED, detail, may_still_land=False)
    return TransferFailed(FailureCause.PEER_GONE, detail, may_still_land=True)
