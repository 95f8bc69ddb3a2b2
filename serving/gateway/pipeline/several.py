"""Several requests of one client as one stream of events: all are checked before any begins, and one error ends all."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from moonshard.rpc import inference_pb2 as pb
from moonshard.serving.gateway.pipeline.generation import Gateway, GenerationEvent
from moonshard.serving.gateway.request import GenerationRequest

MAX_AT_ONCE = 32  # of one client's: the others wait here, and not in the queue that all clients share
MAX_WAITING_EVENTS = 64  # then a slow reader holds up what is generated for it

type Numbered = tuple[int, GenerationEvent]
type Generate = Callable[[GenerationRequest], AsyncGenerator[GenerationEvent]]


async def generate_all(
    gateway: Gateway, requests: Sequence[GenerationRequest], generate: Generate
) -> AsyncGenerator[Numbered]:
    """Events of all, each with its request's number, as they come. Close it (`aclosing`) to cancel.

    `generate`: of one, as `Gateway.generate` or by way of it. Raises the first RequestError of any, as that does; for
    what is wrong with the requests themselves before any has begun.
    """
    checked = [await gateway.checked(request) for request in requests]
    events: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue(MAX_WAITING_EVENTS)
    generating = asyncio.create_task(_generate_into(events, generate, checked))
    try:
        while (event := await events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event
    finally:
        generating.cancel()
        await asyncio.gather(generating, return_exceptions=True)


def total_usage(summaries: Sequence[pb.Summary]) -> pb.Usage:
    usages = [summary.usage for summary in summaries]
    by_tier = Counter[str]()
    for usage in usages:
        by_tier.update(usage.cached_by_tier)
    return pb.Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        cached_by_tier=by_tier,
    )


async def _generate_into(
    events: asyncio.Queue[Numbered | Exception | None], generate: Generate, requests: Sequence[GenerationRequest]
) -> None:
    """None at the end, or the error that ends all."""
    at_once = asyncio.Semaphore(MAX_AT_ONCE)

    async def generate_one(number: int, request: GenerationRequest) -> None:
        async with at_once, aclosing(generate(request)) as found:
            async for event in found:
                await events.put((number, event))

    end: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for number, request in enumerate(requests):
                group.create_task(generate_one(number, request))
    except ExceptionGroup as errors:
        end = errors.exceptions[0]
    await events.put(end)
