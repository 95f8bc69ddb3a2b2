"""A gRPC message is checked in the same order as an HTTP body: its sender first, then its size, then its content."""

import asyncio
import gc
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc.client import AsyncClient
from moonshard.rpc.server.open_services import MAX_BYTES as OPEN_BYTES
from moonshard.rpc.status import InvalidArgument, Overloaded, RequestError, TooLarge, Unauthenticated, from_rpc_error
from moonshard.serving.config.keys import GatewayConfig
from moonshard.serving.gateway.fronts import HURRIED_TIMEOUT_S
from moonshard.serving.gateway.grpc.front import SERVICE
from moonshard.serving.gateway.grpc.gate import MAX_FIELDS
from moonshard.serving.gateway.intake.bounds import MAX_OTHER_VALUES
from moonshard.serving.gateway.process import RunningGateway
from moonshard.serving.gateway.request import GenerationRequest
from tests.rpc import raw_grpc
from tests.rpc.raw_grpc import field
from tests.serving.gateway.fake_worker import MAX_CONTEXT_TOKENS, FakeWorker

GENERATE, TOKENIZE, DETOKENIZE = (f"/{SERVICE.full_name}/{name}" for name in ("Generate", "Tokenize", "Detokenize"))
HEALTH = "/grpc.health.v1.Health/Check"
MAX_BYTES = 8 << 20
EMPTY_MESSAGE = b"\x0a\x00"


@pytest.fixture
def gateway_config(request: pytest.FixtureRequest, tmp_path: Path) -> GatewayConfig:
    """One message may take its time; of more, the older ones are hurried."""
    config = GatewayConfig(
        port=0, grpc_port=0, drain_timeout_s=5, max_body_bytes=MAX_BYTES, max_bytes_in_flight=MAX_BYTES
    )
    changes = dict(getattr(request, "param", {}))
    if changes.pop("has_keys", False):
        (tmp_path / "keys.toml").write_text("[keys]\n")
        changes["keys"] = tmp_path / "keys.toml"
    return replace(config, **changes)


def config(**changes: object) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("gateway_config", [changes], indirect=True, ids=["-".join(changes)])


@pytest.fixture
async def channel(running: RunningGateway) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(running.grpc) as channel:
        yield channel


async def refusal(
    channel: grpc.aio.Channel, path: str, message: bytes, compression: grpc.Compression | None = None
) -> RequestError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in channel.unary_stream(path)(message, compression=compression):
            pass
    return from_rpc_error(caught.value)


@config(has_keys=True)
async def test_a_caller_without_a_key_is_told_so_before_it_has_sent_its_message(running: RunningGateway):
    async with raw_grpc.connected(running.grpc) as raw, asyncio.timeout(10):
        for stream, path in ((1, GENERATE), (3, TOKENIZE)):
            await raw.begin(stream, path)
            ended, headers = await raw.ended()
            assert ended == stream
            assert b"no API key" in headers


@config(has_keys=True)
async def test_whatever_a_caller_without_a_key_sends_it_is_told_of_its_key(channel: grpc.aio.Channel):
    for message in (EMPTY_MESSAGE * 100_000, b"\xff" * 100, b""):
        assert isinstance(await refusal(channel, GENERATE, message), Unauthenticated)


async def test_a_message_of_too_many_fields_is_refused_unparsed(channel: grpc.aio.Channel, worker: FakeWorker):
    messages = b"\x0a\x02" + EMPTY_MESSAGE
    for path, inner in ((GENERATE, EMPTY_MESSAGE), (GENERATE, messages), (TOKENIZE, EMPTY_MESSAGE)):
        chat = inner * MAX_FIELDS
        error = await refusal(channel, path, field(4 if path == GENERATE else 3, chat))
        assert isinstance(error, InvalidArgument)
        assert str(MAX_FIELDS) in error.message
    assert worker.runs == []


async def test_more_packed_ids_than_any_context_holds_are_a_prompt_too_long(channel: grpc.aio.Channel):
    for path, num_contexts in ((GENERATE, 1), (DETOKENIZE, 2)):
        ids = b"\x01" * (num_contexts * MAX_CONTEXT_TOKENS + MAX_OTHER_VALUES + 1)
        error = await refusal(channel, path, field(3, field(1, ids)) if path == GENERATE else field(2, ids))
        assert isinstance(error, InvalidArgument)
        assert "the message with more than" in error.message
        assert f"maximum context length is {MAX_CONTEXT_TOKENS} tokens" in error.message


async def test_a_schema_of_too_many_values_is_refused_unparsed(channel: grpc.aio.Channel, worker: FakeWorker):
    tool = pb.Tool(name="f", parameters='{"enum":[' + "1," * MAX_FIELDS + "1]}")
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")], tools=[tool])
    error = await refusal(channel, GENERATE, pb.GenerateRequest(chat=chat).SerializeToString())
    assert isinstance(error, InvalidArgument)
    assert str(MAX_FIELDS) in error.message
    assert worker.runs == []


async def test_what_a_message_becomes_counts_as_in_flight(channel: grpc.aio.Channel):
    """Sixteen such are more than may be: some are told to come again, and nothing is left of any."""
    messages = [pb.ChatMessage(role="user", content="hi")] * (MAX_FIELDS // 4)
    message = pb.GenerateRequest(chat=pb.ChatPrompt(messages=messages)).SerializeToString()
    assert len(message) * 16 < MAX_BYTES
    errors = await asyncio.gather(*(refusal(channel, GENERATE, message) for _ in range(16)))
    assert Overloaded in {type(error) for error in errors}
    assert "maximum context length" in (await refusal(channel, GENERATE, message)).message


async def test_a_group_hides_no_fields_behind_it(channel: grpc.aio.Channel):
    """Protobuf's parser takes groups that it does not know."""
    group = b"\x9b\x06\x9c\x06"
    pb.GenerateRequest.FromString(group)
    error = await refusal(channel, GENERATE, group + (b"\x22\x02" + EMPTY_MESSAGE) * MAX_FIELDS)
    assert isinstance(error, InvalidArgument)
    assert "cannot be read" in error.message


async def test_as_many_messages_as_may_be_are_read(channel: grpc.aio.Channel):
    """Refused for what they are: there is no such role."""
    num = (MAX_FIELDS - 1) // 2
    chat = pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="nobody")] * num))
    error = await refusal(channel, GENERATE, chat.SerializeToString())
    assert error.field == "chat.messages[0].role"


@config(body_timeout_s=0.2)
async def test_a_message_that_does_not_come_ends_its_call_in_words(running: RunningGateway, grpc_client: AsyncClient):
    async with raw_grpc.connected(running.grpc) as raw, asyncio.timeout(10):
        await raw.begin(1, GENERATE)
        await raw.message_start(1, 1000, b"x" * 10)
        _, headers = await raw.ended()
        assert b"took too long to arrive" in headers
        assert (await grpc_client.generate([1, 2], max_tokens=2)).text


async def test_of_half_messages_the_newest_stays_and_nobody_waits_for_the_others(
    running: RunningGateway, grpc_client: AsyncClient
):
    """One may take its time; whoever sends all of its message is served meanwhile."""
    async with raw_grpc.connected(running.grpc) as raw, asyncio.timeout(20):
        for stream in (1, 3, 5):
            await raw.begin(stream, GENERATE)
            await raw.message_start(stream, MAX_BYTES // 2, b"x" * 10)
        assert (await grpc_client.generate([1, 2], max_tokens=2)).text
        assert {(await raw.ended())[0] for _ in range(2)} == {1, 3}
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(raw.ended(), 3 * HURRIED_TIMEOUT_S)


async def test_a_message_over_the_limit_is_too_large(channel: grpc.aio.Channel):
    assert isinstance(await refusal(channel, GENERATE, b"x" * (MAX_BYTES + 1)), TooLarge)


async def test_a_small_message_that_holds_a_large_one_is_too_large(channel: grpc.aio.Channel):
    message = field(2, b"a" * 2 * MAX_BYTES)
    error = await refusal(channel, GENERATE, message, grpc.Compression.Gzip)
    assert isinstance(error, TooLarge)


async def test_a_call_without_a_message_is_told_so(running: RunningGateway):
    async with raw_grpc.connected(running.grpc) as raw, asyncio.timeout(10):
        await raw.begin(1, GENERATE, is_last=True)
        _, headers = await raw.ended()
        assert b"no message" in headers


async def test_what_anybody_may_ask_for_is_asked_for_in_few_words(channel: grpc.aio.Channel):
    asked = health_pb2.HealthCheckRequest(service="x" * OPEN_BYTES).SerializeToString()
    assert isinstance(await refusal(channel, HEALTH, asked), TooLarge)
    answer = health_pb2.HealthCheckResponse.FromString(await channel.unary_unary(HEALTH)(b""))
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING  # only the process itself says otherwise


async def test_nothing_is_left_of_what_was_refused(channel: grpc.aio.Channel):
    """Else the bytes in flight would soon be too many."""
    chat = EMPTY_MESSAGE * (MAX_BYTES // 8)
    for _ in range(6):
        assert isinstance(await refusal(channel, GENERATE, field(4, chat)), InvalidArgument)


def num_requests() -> int:
    return sum(isinstance(held, GenerationRequest) for held in gc.get_objects())


async def test_a_call_that_was_refused_is_gone_without_the_collector(channel: grpc.aio.Channel):
    """A long prompt is held by little that the collector counts, so that it would come late."""
    prompt = pb.GenerateRequest(tokens=pb.TokenIds(ids=[1] * (2 * MAX_CONTEXT_TOKENS))).SerializeToString()
    gc.collect()
    num_before = num_requests()  # of other tests, that a fixture or a traceback holds
    gc.disable()
    try:
        assert isinstance(await refusal(channel, GENERATE, prompt), InvalidArgument)
        async with asyncio.timeout(10):
            while num_requests() > num_before:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        gc.enable()
