"""Nobody without the cluster's key is let in or told anything, and nothing that was overheard opens the door."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest

from moonshard.rpc import link_pb2, link_pb2_grpc
from moonshard.rpc.server import door, seldom
from moonshard.rpc.server.door import Knock, ServerUnproved, call_once, open_stream
from moonshard.rpc.server.server import BoundServer, build_server
from moonshard.rpc.status import InvalidArgument
from tests.rpc import raw_grpc

KEY, OTHER_KEY = bytes(range(32)), bytes(32)
LINK, INSPECT = "/moonshard.v1.Worker/Link", "/moonshard.v1.Worker/Inspect"
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


class Inside(link_pb2_grpc.WorkerServicer):
    """The service behind the door: it says at once who it is, and keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[link_pb2.GatewayMessage] = []
        self.num_calls = 0
        self.error: InvalidArgument | None = None

    async def Link(self, request_iterator: AsyncIterator[link_pb2.GatewayMessage], context: Any) -> None:
        self.num_calls += 1
        await context.write(link_pb2.WorkerMessage(welcome=link_pb2.Welcome(fingerprint="a secret")))
        try:
            async for message in request_iterator:
                self.heard.append(message)
        except InvalidArgument as error:
            self.error = error

    async def Inspect(self, request_iterator: Any, context: Any) -> link_pb2.Inspection:
        del context
        self.num_calls += 1
        assert [request async for request in request_iterator] == [link_pb2.InspectRequest()]
        return link_pb2.Inspection(epoch=b"e" * 16)


@asynccontextmanager
async def serving(
    *more: Callable[[grpc.aio.Server], None], key: bytes = KEY
) -> AsyncIterator[tuple[Inside, BoundServer, grpc.aio.Channel]]:
    inside = Inside()
    server = build_server(
        host="127.0.0.1",
        port=0,
        add_servicers=[lambda server: link_pb2_grpc.add_WorkerServicer_to_server(inside, server), *more],
        service_names=["moonshard.v1.Worker"],
        key=key,
    )
    await server.start()
    try:
        async with asyncio.timeout(30), grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield inside, server, channel
    finally:
        await server.stop(0)


def raw(channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str | bytes]]) -> Any:
    """A call whose messages are bytes, both ways."""
    return channel.stream_stream(LINK)(metadata=tuple(metadata))


async def refusal(call: Any) -> grpc.StatusCode:
    """How the call ends. Not a byte may come before."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    return refused.value.code()


async def test_both_ends_that_have_the_key_talk():
    async with serving() as (inside, server, channel):
        call: Any = await open_stream(channel, LINK, KEY, server.port, link_pb2.WorkerMessage.FromString)
        assert (await call.read()).welcome.fingerprint == "a secret"
        await call.write(link_pb2.GatewayMessage(refused=link_pb2.Refused(message="no")))
        await call.done_writing()
        assert not await call.read()
        assert [message.refused.message for message in inside.heard] == ["no"]


async def test_one_request_is_answered_to_a_caller_on_a_thread():
    async with serving() as (_, server, _):

        def ask() -> bytes:
            with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                return call_once(channel, INSPECT, KEY, server.port, link_pb2.InspectRequest(), timeout_s=20)

        assert link_pb2.Inspection.FromString(await asyncio.to_thread(ask)).epoch == b"e" * 16


@pytest.mark.parametrize("frame", [b"", b"1" * 31, b"1" * 32, b"1" * 33, b"1" * 100_000])
async def test_a_wrong_proof_is_turned_away_and_reaches_nobody(frame: bytes):
    async with serving() as (inside, server, channel):
        call = raw(channel, Knock(OTHER_KEY, LINK, server.port).metadata)
        await call.write(frame)
        assert await refusal(call) is UNAUTHENTICATED
        assert inside.num_calls == 0


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("moonshard-nonce-bin", bytes(32)),),
        (("moonshard-protocol-version", "5"), ("moonshard-port", "1"), ("moonshard-nonce-bin", bytes(31))),
        (("moonshard-protocol-version", "x"), ("moonshard-port", "1"), ("moonshard-nonce-bin", bytes(32))),
        (("moonshard-protocol-version", "9" * 5000), ("moonshard-port", "-1"), ("moonshard-nonce-bin", bytes(32))),
    ],
)
async def test_whoever_does_not_ask_for_a_challenge_is_turned_away(metadata):
    async with serving() as (inside, _, channel):
        call = raw(channel, metadata)
        assert await refusal(call) is UNAUTHENTICATED
        assert inside.num_calls == 0


async def test_an_old_gateway_that_begins_with_hello_is_turned_away():
    async with serving() as (inside, _, channel):
        call: Any = link_pb2_grpc.WorkerStub(channel).Link()
        with suppress(grpc.aio.AioRpcError):  # the call may have ended before its first message
            await call.write(link_pb2.GatewayMessage(hello=link_pb2.Hello(protocol_version=4)))
        assert await refusal(call) is UNAUTHENTICATED
        assert inside.num_calls == 0


async def test_another_protocol_version_is_named():
    async with serving() as (inside, server, channel):
        metadata = dict(Knock(KEY, LINK, server.port).metadata) | {"moonshard-protocol-version": "99"}
        call = raw(channel, tuple(metadata.items()))
        with pytest.raises(grpc.aio.AioRpcError, match="protocol_version is 99") as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert inside.num_calls == 0


async def test_a_recorded_exchange_is_worth_nothing_on_another_connection():
    async with serving() as (inside, server, channel):
        knock = Knock(KEY, LINK, server.port)
        first = raw(channel, knock.metadata)
        proof = knock.answer(await first.initial_metadata())
        await first.write(proof)
        assert link_pb2.WorkerMessage.FromString(await first.read()).welcome.fingerprint
        again = raw(channel, knock.metadata)  # all that the first caller said
        await again.write(proof)
        assert await refusal(again) is UNAUTHENTICATED
        assert inside.num_calls == 1
        first.cancel()


async def test_the_servers_own_proof_sent_back_is_none():
    async with serving() as (inside, server, channel):
        call = raw(channel, Knock(OTHER_KEY, LINK, server.port).metadata)
        said = dict(await call.initial_metadata())
        await call.write(said["moonshard-proof-bin"])
        assert await refusal(call) is UNAUTHENTICATED
        assert inside.num_calls == 0


async def test_a_proof_for_one_method_or_port_opens_no_other():
    async with serving() as (inside, server, channel):
        for knock in (Knock(KEY, INSPECT, server.port), Knock(KEY, LINK, server.port ^ 1)):
            call = raw(channel, knock.metadata)
            with pytest.raises(ServerUnproved):
                knock.answer(await call.initial_metadata())
        assert inside.num_calls == 0


async def test_a_caller_tells_a_server_without_the_key_nothing():
    async with serving(key=OTHER_KEY) as (inside, server, channel):
        with pytest.raises(ServerUnproved, match=r"cluster\.key_file"):
            await open_stream(channel, LINK, KEY, server.port, link_pb2.WorkerMessage.FromString)
        assert inside.num_calls == 0


async def test_a_call_that_broke_off_says_how_and_not_that_nothing_was_proved():
    """Its empty metadata may be here before its status is."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del reader
        writer.close()

    listener = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]

    def ask() -> grpc.StatusCode:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as caught:
            call_once(channel, INSPECT, KEY, port, link_pb2.InspectRequest(), timeout_s=20)
        return caught.value.code()  # pyright: ignore[reportAttributeAccessIssue]

    assert {await asyncio.to_thread(ask) for _ in range(200)} == {grpc.StatusCode.UNAVAILABLE}
    listener.close()


async def test_a_stranger_who_passes_the_challenge_on_to_a_worker_at_another_port_is_found():
    """As one would who has taken the port of a worker that crashed, while others live."""
    async with serving() as (inside, server, channel):

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            worker_reader, worker_writer = await asyncio.open_connection("127.0.0.1", server.port)

            async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                while data := await source.read(65_536):
                    sink.write(data)
                sink.close()

            await asyncio.gather(copy(reader, worker_writer), copy(worker_reader, writer), return_exceptions=True)

        stranger = await asyncio.start_server(pass_on, "127.0.0.1", 0)
        port = stranger.sockets[0].getsockname()[1]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as taken:
            with pytest.raises(grpc.aio.AioRpcError, match=f"called at port {port}"):
                await open_stream(taken, LINK, KEY, port, link_pb2.WorkerMessage.FromString)
        stranger.close()
        await channel.close()
        assert inside.num_calls == 0


async def test_who_proves_nothing_in_time_is_turned_away(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(door, "TIMEOUT_S", 0.05)
    async with serving() as (inside, server, channel):
        call = raw(channel, Knock(KEY, LINK, server.port).metadata)
        assert await refusal(call) is UNAUTHENTICATED
        assert inside.num_calls == 0


async def test_of_many_who_prove_nothing_the_oldest_is_turned_away_and_who_has_the_key_comes_in(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(door, "MAX_UNPROVED", 3)
    async with serving() as (inside, server, channel):
        waiting: list[Any] = []
        for _ in range(4):
            waiting.append(raw(channel, Knock(KEY, LINK, server.port).metadata))
            await waiting[-1].initial_metadata()  # the challenge: it is among those who have proved nothing
        oldest, *others = waiting
        call = await open_stream(channel, LINK, KEY, server.port, link_pb2.WorkerMessage.FromString)
        assert isinstance(await call.read(), link_pb2.WorkerMessage)
        assert await refusal(oldest) is UNAUTHENTICATED
        assert not any(call.done() for call in others)
        assert inside.num_calls == 1
        for call in others:
            call.cancel()


async def test_a_call_of_one_message_is_turned_away_before_it_has_come():
    one = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    generic = grpc.method_handlers_generic_handler("some.Service", {"Method": one})
    async with (
        serving(lambda server: server.add_generic_rpc_handlers((generic,))) as (_, server, _),
        raw_grpc.connected(f"127.0.0.1:{server.port}") as raw,
    ):
        await raw.begin(1, "/some.Service/Method")
        await raw.message_start(1, 1000, b"")
        assert b"proves nothing" in (await raw.ended())[1]


async def test_a_frame_that_is_no_message_is_an_invalid_argument():
    async with serving() as (inside, server, channel):
        knock = Knock(KEY, LINK, server.port)
        call = raw(channel, knock.metadata)
        await call.write(knock.answer(await call.initial_metadata()))
        await call.read()
        await call.write(b"\xff" * 20)
        assert not await call.read()
        assert inside.error is not None
        assert inside.error.field == "message"


async def test_a_caller_that_hangs_up_as_it_has_another_key_is_told_of_in_the_servers_log(
    caplog: pytest.LogCaptureFixture,
):
    async with serving() as (inside, server, channel):
        with pytest.raises(ServerUnproved):
            await open_stream(channel, LINK, OTHER_KEY, server.port, link_pb2.WorkerMessage.FromString)
        while "the proof of the cluster's key (cluster.key_file) is wrong" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # what is logged has no event
        assert inside.num_calls == 0


async def test_a_peer_is_logged_once_a_minute_for_each_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    with caplog.at_level(logging.WARNING, "moonshard.rpc.server.door"):
        async with serving() as (_, server, channel):
            for _ in range(5):
                assert await refusal(raw(channel, ())) is UNAUTHENTICATED
                call = raw(channel, Knock(OTHER_KEY, LINK, server.port).metadata)
                await call.write(secrets.token_bytes(32))
                assert await refusal(call) is UNAUTHENTICATED
            told = [record.getMessage() for record in caplog.records]
            assert len(told) == 2
            assert all("127.0.0.1 is turned away" in text for text in told)
            monkeypatch.setattr(seldom, "PERIOD_S", 0.0)  # a minute later
            assert await refusal(raw(channel, ())) is UNAUTHENTICATED
            assert len(caplog.records) == 3
