"""Both ends of a call prove that they hold the cluster's key, before anything of either is parsed or told.

The caller sends a nonce in its metadata. The server answers with one of its own and an HMAC over both, in its initial
metadata; the caller checks that and sends its own HMAC as the call's first message, raw. Only then messages are parsed.
Both nonces are fresh, so that what was recorded is worth nothing on another connection. The role is part of what is
proved, so that neither is a reflected proof; and so is the port that was called, so that whoever took a port cannot
pass the challenge on to a worker at another. With TLS, which ends at the holder of the certificate, the port is left
open: a forwarder may change it.

Calls without a stream of requests have no room for this and are refused, but for health and reflection, which say
nothing of the cluster. What follows is neither kept secret nor protected from changes: that takes TLS. The key comes
from `serving.config.cluster_key`.
Source: ISO/IEC 9798-4, mutual authentication in three passes with a cryptographic check function.
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

from moonshard.rpc.link import PROTOCOL_VERSION
from moonshard.rpc.server.deferred_request import next_message, parsed
from moonshard.rpc.server.open_services import PATHS as OPEN_SERVICES
from moonshard.rpc.server.receive_limiter import ReceiveLimiter
from moonshard.rpc.server.seldom import Seldom
from moonshard.rpc.status import (
    FailedPrecondition,
    RequestError,
    RequestTimeout,
    Unauthenticated,
    abort,
)

NONCE_BYTES = 32
PROOF_BYTES = 32
TIMEOUT_S = 10.0  # for a peer to prove itself
MAX_UNPROVED = 16  # calls whose callers may take that long, since each may hold a whole message; of more, the oldest
HURRIED_TIMEOUT_S = 0.1  # have only this: who has the key proves it in milliseconds
STATUS_TIMEOUT_S = 1.0  # for a call that broke off to say why
MAX_DIGITS = 10

_VERSION, _PORT = "moonshard-protocol-version", "moonshard-port"
_NONCE, _PROOF = "moonshard-nonce-bin", "moonshard-proof-bin"
_UNPROVED = "it did not prove that it holds the cluster's key (cluster.key_file)"

logger = logging.getLogger(__name__)

Metadata = Sequence[tuple[str, str | bytes]]


class ServerUnproved(Unauthenticated):
    """Whoever answers at the address has not proved that it belongs to the cluster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Terms:
    """What the two proofs cover, so that they hold for this call and no other."""

    method: str
    port: int  # as it was called; 0: open
    caller_nonce: bytes
    server_nonce: bytes

    def proof(self, key: bytes, role: str) -> bytes:
        """The proof of the side in that role."""
        digest = hmac.new(key, digestmod=hashlib.sha256)
        ends = f"{role} {PROTOCOL_VERSION} {self.port} {self.method}".encode()
        for part in (b"moonshard proof", ends, self.caller_nonce, self.server_nonce):
            digest.update(len(part).to_bytes(4, "big"))
            digest.update(part)
        return digest.digest()


# ---- the caller's end


class Knock:
    """The caller's side of one call. `port` is the one that is called; 0 with TLS."""

    def __init__(self, key: bytes, method: str, port: int):
        self._key = key
        self._method = method
        self._port = port
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self.metadata: tuple[tuple[str, str | bytes], ...] = (
            (_VERSION, str(PROTOCOL_VERSION)),
            (_PORT, str(port)),
            (_NONCE, self._nonce),
        )

    def answer(self, metadata: Any) -> bytes:
        """The first message, now that the server's metadata are here. ServerUnproved where they prove nothing."""
        said = _said(metadata)
        terms = _Terms(
            method=self._method, port=self._port, caller_nonce=self._nonce, server_nonce=_bytes(said.get(_NONCE))
        )
        expected = terms.proof(self._key, "server")
        is_fresh = len(terms.server_nonce) == NONCE_BYTES
        if not hmac.compare_digest(expected, _bytes(said.get(_PROOF))) or not is_fresh:
            raise ServerUnproved(_UNPROVED, field="cluster.key_file")
        return terms.proof(self._key, "caller")


async def open_stream(
    channel: grpc.aio.Channel, method: str, key: bytes, port: int, parse: Callable[[bytes], Any]
) -> grpc.aio.StreamStreamCall:
    """A call whose both ends have proved themselves.

    Raises:
        ServerUnproved: whoever answers has not the key. Nothing was told.
        grpc.aio.AioRpcError: the call's own, where it broke off.
        TimeoutError: nobody proved anything in time.
    """
    knock = Knock(key, method, port)
    stub = channel.stream_stream(method, request_serializer=_serialized, response_deserializer=parse)
    call = stub(metadata=knock.metadata)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            metadata = await call.initial_metadata()
            if _NONCE not in _said(metadata):
                await _raise_status(call)
            await call.write(knock.answer(metadata))
    except BaseException:
        call.cancel()
        raise
    return call


async def _raise_status(call: grpc.aio.StreamStreamCall) -> None:
    """Raises the status of a call that broke off; does nothing where it goes on."""
    with contextlib.suppress(TimeoutError):
        code = await asyncio.wait_for(call.code(), STATUS_TIMEOUT_S)
        raise grpc.aio.AioRpcError(
            code, await call.initial_metadata(), await call.trailing_metadata(), details=await call.details()
        )


class ProvedFrames(Iterator[bytes]):
    """The messages of a call on threads: the proof first, once the server has proved itself. `call` is told by `go`.

    Where the server proves nothing the call is cancelled, and `fault` says so.
    """

    def __init__(self, knock: Knock, frames: Iterator[bytes]):
        self.fault: ServerUnproved | None = None
        self._knock = knock
        self._calls: SimpleQueue[Any] = SimpleQueue()
        self._frames = frames
        self._is_proved = False

    def go(self, call: Any) -> None:
        self._calls.put(call)

    def __next__(self) -> bytes:
        if self._is_proved:
            return next(self._frames)
        self._is_proved, call = True, self._calls.get()
        metadata = call.initial_metadata()
        if _NONCE not in _said(metadata) and _has_ended(call):
            raise StopIteration  # its status says why
        try:
            return self._knock.answer(metadata)
        except ServerUnproved as error:
            self.fault = error
            call.cancel()
            raise StopIteration from error


def _has_ended(call: Any) -> bool:
    """Whether a call whose server sent no metadata is over: one that broke off ends a moment after its empty metadata
    arrive.
    """
    try:
        with contextlib.suppress(grpc.FutureCancelledError):
            call.exception(timeout=STATUS_TIMEOUT_S)
    except grpc.FutureTimeoutError:
        return False
    return True


def call_once(
    channel: grpc.Channel, method: str, key: bytes, port: int, request: Message, *, timeout_s: float
) -> bytes:
    """The answer to one request, on this thread. ServerUnproved; grpc.RpcError: the call's own."""
    knock = Knock(key, method, port)
    frames = ProvedFrames(knock, iter([request.SerializeToString()]))
    call = channel.stream_unary(method).future(frames, metadata=knock.metadata, timeout=timeout_s)
    frames.go(call)
    try:
        return call.result()
    except grpc.FutureCancelledError:
        raise frames.fault or Unauthenticated(_UNPROVED) from None


def _serialized(message: bytes | Message) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


# ---- the server's end


class Door(grpc.aio.ServerInterceptor):
    """Lets calls in whose callers prove themselves. `port` tells where the server listens, once calls come.

    Their handlers are coroutines and find in their requests what a generated servicer would. Methods whose paths begin
    with one of `open_services` are anybody's.
    """

    def __init__(
        self,
        key: bytes,
        port: Callable[[], int],
        *,
        has_tls: bool = False,
        open_services: tuple[str, ...] = OPEN_SERVICES,
    ):
        self._open_services = open_services
        self._key = key
        self._port = port
        self._has_tls = has_tls
        self._seldom = Seldom()
        self._limiter = ReceiveLimiter(MAX_UNPROVED, timeout_s=TIMEOUT_S, hurried_timeout_s=HURRIED_TIMEOUT_S)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or method.startswith(self._open_services):
            return handler
        if not handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(self._refuse)  # which leaves the request where it is
        parse = handler.request_deserializer
        serve = handler.stream_stream if handler.response_streaming else handler.stream_unary

        async def behind(frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> Any:
            await self._let_in(method, frames, context)
            return await serve(frames if parse is None else _parsed(frames, parse), context)

        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(behind, response_serializer=handler.response_serializer)

    async def _let_in(self, method: str, frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        try:
            await self._challenge(method, frames, context)
        except RequestError as error:
            self._log(context, error.message)
            await abort(context, error)

    async def _challenge(self, method: str, frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        """Raises the error that turns the caller away."""
        terms = self._terms(method, _said(context.invocation_metadata()))
        await context.send_initial_metadata(((_NONCE, terms.server_nonce), (_PROOF, terms.proof(self._key, "server"))))
        try:
            frame = await next_message(frames, self._limiter) or b""
        except RequestTimeout:
            raise Unauthenticated("no proof of the cluster's key came in time") from None
        if len(frame) != PROOF_BYTES or not hmac.compare_digest(frame, terms.proof(self._key, "caller")):
            raise Unauthenticated("the proof of the cluster's key (cluster.key_file) is wrong")

    def _terms(self, method: str, said: dict[str, str | bytes]) -> _Terms:
        nonce, version, port = _bytes(said.get(_NONCE)), _number(said.get(_VERSION)), _number(said.get(_PORT))
        if version is None or port is None or len(nonce) != NONCE_BYTES:
            raise Unauthenticated(
                f"a proof of the cluster's key (cluster.key_file) is asked for, as protocol_version {PROTOCOL_VERSION} "
                "has it"
            )
        if version != PROTOCOL_VERSION:
            raise FailedPrecondition(
                f"protocol_version is {version}; this worker speaks {PROTOCOL_VERSION}", field="protocol_version"
            )
        if not self._has_tls and port != self._port():
            raise Unauthenticated(
                f"it was called at port {port} and listens at {self._port()}: without [tls] a proof holds for that port"
            )
        return _Terms(method=method, port=port, caller_nonce=nonce, server_nonce=secrets.token_bytes(NONCE_BYTES))

    async def _refuse(self, request: object, context: grpc.aio.ServicerContext) -> None:
        del request
        error = Unauthenticated("a call without a stream of requests proves nothing, and is not answered")
        self._log(context, error.message)
        await abort(context, error)

    def _log(self, context: grpc.aio.ServicerContext, message: str) -> None:
        """Logs each peer and reason once a minute. All ports of a host are one peer."""
        peer = str(context.peer()).rpartition(":")[0]
        if self._seldom.may_say(peer, message):
            logger.warning("a caller at %s is turned away: %s", peer, message)


async def _parsed(frames: AsyncIterator[bytes], parse: Callable[[bytes], Any]) -> AsyncIterator[Any]:
    """Raises InvalidArgument for one that is no message."""
    async for frame in frames:
        yield parsed(frame, parse)


class _Pair(Protocol):
    def __getitem__(self, index: int, /) -> Any: ...


def _said(metadata: Any) -> dict[str, str | bytes]:
    pairs: Sequence[_Pair] = tuple(metadata or ())
    return {str(pair[0]): pair[1] for pair in pairs}


def _bytes(value: str | bytes | None) -> bytes:
    return value if isinstance(value, bytes) else b""


def _number(value: str | bytes | None) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= MAX_DIGITS:
        return int(value)
    return None
