"""The public gRPC API on the same pipeline."""

import pytest

from moonshard.rpc import link_pb2
from moonshard.rpc.client import AsyncClient
from moonshard.rpc.status import InternalError, Overloaded
from tests.serving.gateway.fake_worker import MAX_CONTEXT_TOKENS, VOCAB_SIZE, FakeWorker, expected_tokens


async def test_a_stream_is_prompt_then_one_delta_per_token_then_summary(grpc_client: AsyncClient, worker: FakeWorker):
    async with grpc_client.stream([5, 6], max_tokens=7, seed=11, logprobs=2, request_id="mine") as stream:
        deltas = [delta async for delta in stream]
    assert tuple(stream.prompt_token_ids) == (5, 6)
    assert [token for delta in deltas for token in delta.token_ids] == expected_tokens([5, 6], 7)
    assert [len(delta.token_ids) for delta in deltas] == [1] * 7
    assert [len(delta.logprobs[0].top) for delta in deltas] == [2] * 7
    assert stream.summary.seed == worker.runs[0].sampling.seed == 11
    assert stream.summary.request_id == "mine"
    assert worker.runs[0].request_id != b"mine"
    assert stream.summary.usage.completion_tokens == 7


async def test_a_missing_seed_is_drawn_and_told(grpc_client: AsyncClient, worker: FakeWorker):
    completions = [await grpc_client.generate([1], max_tokens=1) for _ in range(2)]
    told = [completion.summary.seed for completion in completions]
    assert told == [run.sampling.seed for run in worker.runs]
    assert told[0] != told[1]


async def test_model_info_is_the_workers_and_the_folders(grpc_client: AsyncClient):
    info = await grpc_client.model_info()
    assert (info.model, info.vocab_size, info.max_context_tokens) == ("kimi", VOCAB_SIZE, MAX_CONTEXT_TOKENS)
    assert info.has_tokenizer
    assert info.stop_token_ids == (2017, 2018)
    assert info.dtype == "float32"


async def test_tokenize_and_detokenize_are_inverse(grpc_client: AsyncClient):
    ids = await grpc_client.tokenize("Hello, world")
    assert await grpc_client.detokenize(ids) == "Hello, world"


async def test_a_chat_prompt_goes_through_the_template(grpc_client: AsyncClient):
    messages = [{"role": "user", "content": "hi"}]
    completion = await grpc_client.generate(messages, max_tokens=1)
    assert list(completion.prompt_token_ids) == list(await grpc_client.tokenize(messages))


async def test_the_workers_errors_keep_their_kind_and_delay(grpc_client: AsyncClient, worker: FakeWorker):
    worker.script.failure = link_pb2.Failed(code=8, message="full", retry_after_s=2.5)
    with pytest.raises(Overloaded) as full:
        await grpc_client.generate([1])
    assert full.value.retry_after_s == 2.5
    worker.script.failure = link_pb2.Failed(code=13, message="bug")
    with pytest.raises(InternalError):
        await grpc_client.generate([1])


async def test_a_fully_cached_prompt_never_counts_more_than_itself(grpc_client: AsyncClient, worker: FakeWorker):
    worker.script.cached_tokens = 10_000
    usage = (await grpc_client.generate([1, 2, 3], max_tokens=2)).usage
    assert usage.cached_tokens == 2  # the last token is always computed


async def test_health_is_not_serving_before_the_process_says_so(grpc_client: AsyncClient):
    assert not await grpc_client.health()
