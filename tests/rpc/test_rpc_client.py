"""Both clients against a scripted service: the same values, the same errors, and nothing left running."""

import asyncio
import subprocess
import sys

import pytest

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc.client import AsyncClient, Client
from moonshard.rpc.status import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    NotFound,
    Overloaded,
    Unavailable,
)
from moonshard.rpc.types import Choice, Completion, Delta, PositionLogprobs, TokenLogprob

FIRST = PositionLogprobs(chosen=TokenLogprob(token_id=7, logprob=-0.5), top=(TokenLogprob(token_id=9, logprob=-0.25),))
CHAT = [{"role": "user", "content": "hi"}]


def generate(target: str, *args, **options) -> Completion:
    with Client(target) as client:
        return client.generate(*args, **options)


async def test_stream_gives_each_delta_then_the_summary(target):
    async with AsyncClient(target) as client, client.stream("x", n=2) as stream:
        deltas = [delta async for delta in stream]
    assert deltas == [
        Delta(choice=1, token_ids=(5,), text="b"),
        Delta(choice=0, token_ids=(7,), text="a", logprobs=(FIRST,)),
        Delta(choice=1, token_ids=(6,), text="B", finish_reason="length"),
        Delta(choice=0, token_ids=(0,), text="A", finish_reason="stop", stop_reason=0),
    ]
    assert stream.prompt_token_ids == (3, 4, 5)
    assert (stream.summary.request_id, stream.summary.model, stream.summary.seed) == ("r1", "tiny", 2**64 - 1)
    assert stream.summary.usage.cached_tokens == 2
    assert sum(stream.summary.timing.phases().values()) == stream.summary.timing.e2e_ms == 10


async def test_the_clients_own_times_are_ordered_and_unknown_until_they_happen(target):
    async with AsyncClient(target) as client, client.stream("x") as stream:
        assert (stream.client_ttft_ms, stream.client_e2e_ms) == (None, None)
        with pytest.raises(RuntimeError, match="first event"):
            _ = stream.prompt_token_ids
        await anext(stream)
        with pytest.raises(RuntimeError, match="end"):
            _ = stream.summary
        async for _ in stream:
            pass
        assert stream.client_ttft_ms is not None
        assert stream.client_e2e_ms is not None
        assert 0 < stream.client_ttft_ms <= stream.client_e2e_ms


async def test_sync_and_async_clients_give_the_same_completion(target):
    async with AsyncClient(target) as client:
        completion = await client.generate("x", n=2)
    assert completion == await asyncio.to_thread(generate, target, "x", n=2)
    choice = Choice(text="aA", token_ids=(7, 0), logprobs=(FIRST,), finish_reason="stop", stop_reason=0)
    assert completion.choices[0] == choice
    assert (completion.text, completion.prompt_token_ids) == ("aA", (3, 4, 5))
    assert completion.usage.completion_tokens == 4


async def test_sync_and_async_clients_ask_the_same(inference, target):
    options = {"max_tokens": 4, "temperature": 0, "stop": "end", "metadata": (("traceparent", "00-aa-bb-01"),)}
    async with AsyncClient(target) as client:
        await client.generate(CHAT, **options)
    await asyncio.to_thread(generate, target, CHAT, **options)
    assert inference.requests[0] == inference.requests[1]
    assert [metadata["traceparent"] for metadata in inference.metadata] == ["00-aa-bb-01"] * 2


async def test_sync_and_async_clients_answer_the_small_questions_alike(target):
    def ask() -> tuple:
        with Client(target) as client:
            return (
                client.model_info("m"),
                client.tokenize("hé"),
                client.tokenize(CHAT),
                client.detokenize([104, 105]),
                client.health(),
            )

    async with AsyncClient(target) as client:
        answers = (
            await client.model_info("m"),
            await client.tokenize("hé"),
            await client.tokenize(CHAT),
            await client.detokenize([104, 105]),
            await client.health(),
        )
    assert answers == await asyncio.to_thread(ask)
    assert answers[1:] == (tuple("hé".encode()), tuple(b"hi"), "hi", True)
    assert (answers[0].model, answers[0].stop_token_ids, answers[0].vocab_size) == ("m", (1, 2), 256)


async def test_an_error_midway_keeps_what_came_before(inference, target):
    inference.script = [*inference.script[:2], Overloaded("full", retry_after_s=0.5)]
    async with AsyncClient(target) as client, client.stream("x") as stream:
        assert (await anext(stream)).text == "b"
        with pytest.raises(Overloaded, match="full") as caught:
            await anext(stream)
    assert caught.value.retry_after_s == 0.5


async def test_the_sync_client_raises_the_servers_error_with_its_field(inference, target):
    inference.script = [InvalidArgument("no", field="top_p")]
    with pytest.raises(InvalidArgument) as caught:
        await asyncio.to_thread(generate, target, "x")
    assert caught.value.field == "top_p"


async def test_cancel_reaches_the_server_and_ends_the_stream_with_cancelled(inference, target):
    inference.script, inference.holds = inference.script[:2], True
    async with AsyncClient(target) as client:
        stream = client.stream("x")
        await anext(stream)
        stream.cancel()
        for _ in range(2):
            with pytest.raises(Cancelled):
                await anext(stream)
        async with asyncio.timeout(10):
            await inference.ended.wait()


async def test_leaving_the_context_early_frees_the_request(inference, target):
    inference.script, inference.holds = inference.script[:2], True
    async with AsyncClient(target) as client:
        async with client.stream("x") as stream:
            await anext(stream)
        async with asyncio.timeout(10):
            await inference.ended.wait()


async def test_leaving_the_sync_context_early_frees_the_request(inference, target):
    inference.script, inference.holds = inference.script[:2], True
    with Client(target) as client:
        with client.stream("x") as stream:
            await asyncio.to_thread(next, stream)
        async with asyncio.timeout(10):
            await inference.ended.wait()


async def test_the_sync_stream_can_be_cancelled_from_another_thread(inference, target):
    inference.script, inference.holds = inference.script[:2], True
    with Client(target) as client:
        stream = client.stream("x")
        await asyncio.to_thread(next, stream)
        reader = asyncio.create_task(asyncio.to_thread(list, stream))
        stream.cancel()
        with pytest.raises(Cancelled):
            await reader
        async with asyncio.timeout(10):
            await inference.ended.wait()


async def test_a_cancelled_reader_task_stays_cancelled_and_frees_the_request(inference, target):
    inference.script, inference.holds = inference.script[:2], True
    async with AsyncClient(target) as client:
        started = asyncio.Event()

        async def read() -> None:
            async with client.stream("x") as stream:
                async for _ in stream:
                    started.set()

        reader = asyncio.create_task(read())
        await started.wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        async with asyncio.timeout(10):
            await inference.ended.wait()


async def test_the_clients_deadline_ends_the_request_on_both_sides(inference, target):
    inference.script, inference.holds = inference.script[:2], True
    async with AsyncClient(target, timeout_s=60) as client:
        with pytest.raises(DeadlineExceeded):
            await client.generate("x", timeout_s=0.1)
        async with asyncio.timeout(10):
            await inference.ended.wait()
    with pytest.raises(DeadlineExceeded):
        await asyncio.to_thread(generate, target, "x", timeout_s=0.1)


async def test_the_clients_own_deadline_holds_where_a_call_names_none(inference, target):
    inference.holds = True
    with Client(target, timeout_s=0.1) as client, pytest.raises(DeadlineExceeded):
        await asyncio.to_thread(client.generate, "x")
    async with AsyncClient(target, timeout_s=0.1) as client:
        with pytest.raises(DeadlineExceeded):
            await client.generate("x")


async def test_a_stream_that_just_ends_is_an_error_not_an_answer(inference, target):
    inference.script = inference.script[:-1]
    async with AsyncClient(target) as client:
        with pytest.raises(InternalError, match="summary"):
            await client.generate("x")
    with pytest.raises(InternalError, match="summary"):
        await asyncio.to_thread(generate, target, "x")


async def test_an_event_of_a_newer_server_is_passed_over(inference, target):
    newer = pb.GenerateResponse.FromString(b"\xfa\x01\x02hi")  # field 31, a string
    inference.script.insert(1, newer)
    async with AsyncClient(target) as client:
        assert (await client.generate("x")).text == "aA"


async def test_token_ids_past_grpcs_default_message_limit_arrive(inference, target):
    ids = [160_000] * 2_000_000
    inference.script[0] = pb.GenerateResponse(prompt=pb.TokenIds(ids=ids))
    assert inference.script[0].ByteSize() > 4 * 1024 * 1024
    async with AsyncClient(target) as client:
        assert len((await client.generate(ids)).prompt_token_ids) == len(ids)


def test_no_server_is_unavailable_and_unhealthy(free_port):
    with Client(f"127.0.0.1:{free_port}") as client:
        with pytest.raises(Unavailable):
            client.generate("x")
        assert client.health() is False


async def test_health_of_a_service_that_is_not_there_is_not_found(target):
    async with AsyncClient(target) as client:
        with pytest.raises(NotFound):
            await client.health("moonshard.v1.Nothing")


async def test_a_closed_client_raises_no_grpc_error_of_its_own(inference, target):
    inference.script, inference.holds = inference.script[:2], True
    client = Client(target)
    stream = client.stream("x")
    await asyncio.to_thread(next, stream)
    client.close()
    with pytest.raises(Cancelled):
        await asyncio.to_thread(next, stream)


def test_the_client_imports_neither_jax_nor_the_server_side():
    code = """
import sys
import moonshard.rpc.client
heavy = {"jax", "flax", "numpy", "fastapi", "moonshard.serving", "moonshard.models", "moonshard.rpc.server.server"}
sys.exit(f"loaded: {heavy & sys.modules.keys()}" if heavy & sys.modules.keys() else 0)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
