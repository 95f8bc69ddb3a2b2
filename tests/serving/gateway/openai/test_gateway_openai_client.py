"""OpenAI's own Python client, unchanged."""

from collections.abc import AsyncIterator

import openai
import pytest

from moonshard.rpc import link_pb2
from moonshard.serving.gateway.process import RunningGateway
from tests.serving.gateway.fake_worker import FakeWorker

MESSAGES: list = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


@pytest.fixture
async def client(running: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with openai.AsyncOpenAI(
        base_url=f"{running.http}/v1", api_key="-", max_retries=0, http_client=transport
    ) as client:
        yield client


async def test_chat_with_choices_and_logprobs(client: openai.AsyncOpenAI):
    answer = await client.chat.completions.create(
        model="kimi", messages=MESSAGES, max_completion_tokens=5, n=2, logprobs=True, top_logprobs=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.role == "assistant"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(position.top_logprobs) for position in logprobs.content] == [3] * 5
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10


async def test_a_chat_stream_adds_up_to_the_whole(client: openai.AsyncOpenAI):
    whole = await client.chat.completions.create(model="kimi", messages=MESSAGES, max_tokens=9)
    stream = await client.chat.completions.create(
        model="kimi", messages=MESSAGES, max_tokens=9, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert chunks[0].choices[0].delta.role == "assistant"


async def test_completions_whole_and_streamed(client: openai.AsyncOpenAI):
    whole = await client.completions.create(model="kimi", prompt="Hello", max_tokens=6, logprobs=2)
    stream = await client.completions.create(model="kimi", prompt="Hello", max_tokens=6, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == whole.choices[0].text
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.tokens or []) == 6


async def test_models_are_listed(client: openai.AsyncOpenAI):
    assert [model.id async for model in client.models.list()] == ["kimi"]


async def test_errors_arrive_as_the_clients_own_exceptions(client: openai.AsyncOpenAI, worker: FakeWorker):
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="kimi", messages=MESSAGES, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="gpt", messages=MESSAGES)
    worker.script.failure = link_pb2.Failed(code=8, message="the queue is full", retry_after_s=2.5)
    with pytest.raises(openai.RateLimitError) as full:
        await client.chat.completions.create(model="kimi", messages=MESSAGES, stream=True)
    assert full.value.response.headers["retry-after"] == "3"
    worker.script.failure = link_pb2.Failed(code=13, message="bug")
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(model="kimi", messages=MESSAGES)


async def test_an_error_after_the_stream_began_is_raised_while_reading(client: openai.AsyncOpenAI, worker: FakeWorker):
    worker.script.fail_after_tokens = 3
    stream = await client.completions.create(model="kimi", prompt="Hello", max_tokens=6, stream=True)
    seen = []
    with pytest.raises(openai.APIError, match="the device failed"):
        seen.extend([chunk async for chunk in stream])
