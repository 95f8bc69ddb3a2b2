"""The answer to several prompts of one body: their choices one after another, whole or as one stream.

A choice's index is its prompt's number times `n`, and its own behind that. Which worker computed what is not told,
since there may be several.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from fastapi import Request
from starlette.responses import Response

from moonshard.rpc import inference_pb2 as pb
from moonshard.serving.gateway.http.disconnect import until_disconnect
from moonshard.serving.gateway.http.edge import large_answer
from moonshard.serving.gateway.http.errors import late_headers
from moonshard.serving.gateway.http.event_stream import EventStream
from moonshard.serving.gateway.openai.responses import Chunks, Whole
from moonshard.serving.gateway.pipeline.choice import PromptEvent
from moonshard.serving.gateway.pipeline.generation import Gateway
from moonshard.serving.gateway.pipeline.several import Generate, generate_all, total_usage
from moonshard.serving.gateway.request import GenerationRequest


class SeveralAnswering:
    def __init__(self, gateway: Gateway, generate: Generate, *, keep_alive_s: float) -> None:
        """`generate`: what answers one of them."""
        self._gateway = gateway
        self._generate = generate
        self._keep_alive_s = keep_alive_s

    def streamed(self, request: Request, asked: Sequence[GenerationRequest], told: Chunks) -> Response:
        return EventStream(
            self._chunks(asked, told),
            late_headers=late_headers(request),
            error_event=told.failed,
            keep_alive_s=self._keep_alive_s,
        )

    async def whole(self, request: Request, asked: Sequence[GenerationRequest], told: Whole) -> Response:
        return large_answer(request, await until_disconnect(request.receive, self._body(asked, told)))

    async def _chunks(self, asked: Sequence[GenerationRequest], told: Chunks) -> AsyncGenerator[bytes]:
        summaries: list[pb.Summary] = []
        async with aclosing(self._events(asked, summaries)) as events:
            async for number, event in events:
                if isinstance(event, pb.Delta):
                    if said := told.delta(event):
                        yield said
                else:
                    told.set_prompt(event, number)
        yield told.last(pb.Summary(usage=total_usage(summaries)))

    async def _body(self, asked: Sequence[GenerationRequest], told: Whole) -> bytes:
        summaries: list[pb.Summary] = []
        async with aclosing(self._events(asked, summaries)) as events:
            async for number, event in events:
                told.add(event, number)
        return told.body(pb.Summary(usage=total_usage(summaries)))

    async def _events(
        self, asked: Sequence[GenerationRequest], summaries: list[pb.Summary]
    ) -> AsyncGenerator[tuple[int, PromptEvent | pb.Delta]]:
        """What a response shows, with choices numbered through; summaries are kept for the end."""
        async with aclosing(generate_all(self._gateway, asked, self._generate)) as events:
            async for number, event in events:
                if isinstance(event, pb.Delta):
                    event.choice += number * asked[number].n
                    yield number, event
                elif isinstance(event, pb.TokenIds | pb.PromptLogprobs):
                    yield number, event
                elif isinstance(event, pb.Summary):
                    summaries.append(event)
