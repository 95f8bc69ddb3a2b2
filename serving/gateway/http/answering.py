"""The pipeline's events as an HTTP answer, whole or as a stream, in whichever API's words.

What the words are is said by the objects that are given here; when the client's leaving ends the work, here.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from fastapi import Request
from starlette.responses import Response

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc.status import InternalError, RequestError
from moonshard.serving.gateway.http.disconnect import until_disconnect
from moonshard.serving.gateway.http.edge import large_answer
from moonshard.serving.gateway.http.errors import late_headers
from moonshard.serving.gateway.http.event_stream import KEEP_ALIVE, EventStream
from moonshard.serving.gateway.pipeline.choice import CallsMade, PromptEvent
from moonshard.serving.gateway.pipeline.generation import Gateway, GenerationEvent, Routed
from moonshard.serving.gateway.request import GenerationRequest


class Collected(Protocol):
    """Collects the events of one request into one body."""

    def add(self, event: PromptEvent | CallsMade | pb.Delta) -> None: ...

    def body(self, summary: pb.Summary) -> bytes: ...


class Streamed(Protocol):
    """Turns the events of one request into server-sent events; empty where the client is told nothing."""

    def set_prompt(self, event: PromptEvent, /) -> None: ...

    def delta(self, delta: pb.Delta) -> bytes: ...

    def calls(self, made: CallsMade) -> bytes: ...

    def last(self, summary: pb.Summary) -> bytes: ...

    def failed(self, error: RequestError) -> bytes:
        """An error after the stream began: the status line is gone."""
        ...


class Answering:
    def __init__(self, gateway: Gateway, *, keep_alive_s: float, is_background: bool = False) -> None:
        """`is_background`: nobody waits for these answers; others come first."""
        self._gateway = gateway
        self._is_background = is_background
        self._keep_alive_s = keep_alive_s

    def streamed(
        self, request: Request, asked: GenerationRequest, told: Streamed, *, keep_alive: bytes = KEEP_ALIVE
    ) -> Response:
        headers = late_headers(request)
        return EventStream(
            self._events(asked, told, headers),
            late_headers=headers,
            error_event=told.failed,
            keep_alive_s=self._keep_alive_s,
            keep_alive=keep_alive,
        )

    async def whole(self, request: Request, asked: GenerationRequest, told: Collected) -> Response:
        body = await until_disconnect(request.receive, self._body(asked, told, late_headers(request)))
        return large_answer(request, body)

    def generate(self, asked: GenerationRequest) -> AsyncGenerator[GenerationEvent]:
        """As `Gateway.generate`, behind all others where nobody waits."""
        return self._gateway.generate(replace(asked, is_background=self._is_background))

    async def _events(self, asked: GenerationRequest, told: Streamed, headers: dict[str, str]) -> AsyncGenerator[bytes]:
        """Fills `headers` before the first event."""
        async with aclosing(self.generate(asked)) as events:
            async for event in events:
                if isinstance(event, pb.Delta):
                    if said := told.delta(event):
                        yield said
                elif isinstance(event, CallsMade):
                    if said := told.calls(event):
                        yield said
                elif isinstance(event, pb.TokenIds | pb.PromptLogprobs):
                    told.set_prompt(event)
                elif isinstance(event, Routed):
                    headers |= event.headers()
                else:
                    yield told.last(event)

    async def _body(self, asked: GenerationRequest, told: Collected, headers: dict[str, str]) -> bytes:
        async with aclosing(self.generate(asked)) as events:
            async for event in events:
                if isinstance(event, pb.Summary):
                    return told.body(event)
                if isinstance(event, Routed):
                    headers |= event.headers()
                else:
                    told.add(event)
        raise InternalError("the pipeline ended without a summary")
