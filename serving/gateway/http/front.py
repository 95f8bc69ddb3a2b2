"""The HTTP front: OpenAI's routes, Anthropic's, vLLM's extras, and what operators ask.

Handlers only translate: a body to a `GenerationRequest`, the pipeline's events to a response. Bodies are read raw and
decoded by msgspec, so FastAPI neither validates nor documents them.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import msgspec
from fastapi import FastAPI, Request
from fastapi.telemetry import TelemetryConfig as FastApiTelemetry
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response
from starlette.types import ASGIApp

from moonshard.rpc.status import Unavailable
from moonshard.serving.config.tenants import Tenants
from moonshard.serving.gateway.batches.api.routes import Batches, Handler, Methods, batch_routes
from moonshard.serving.gateway.caller import Caller, check_key, read_caller
from moonshard.serving.gateway.http.answering import Answering
from moonshard.serving.gateway.http.disconnect import until_disconnect
from moonshard.serving.gateway.http.edge import Edge, header_of, large_answer, visible_id
from moonshard.serving.gateway.http.errors import add_error_handlers, error_response, json_response
from moonshard.serving.gateway.http.event_stream import KEEP_ALIVE_S
from moonshard.serving.gateway.http.messages_routes import MessagesRoutes
from moonshard.serving.gateway.http.reading import Bodies
from moonshard.serving.gateway.http.responses_routes import ResponsesRoutes
from moonshard.serving.gateway.http.several import SeveralAnswering
from moonshard.serving.gateway.http.strangers import Strangers
from moonshard.serving.gateway.intake.bounds import TOKENIZED_CONTEXTS, Intake
from moonshard.serving.gateway.openai import requests
from moonshard.serving.gateway.openai.body import BodyDecoder
from moonshard.serving.gateway.openai.prompts import Asked as AskedOfPrompts
from moonshard.serving.gateway.openai.prompts import Prompts
from moonshard.serving.gateway.openai.responses import (
    ChatFormat,
    Chunks,
    CompletionFormat,
    Envelope,
    Format,
    Whole,
)
from moonshard.serving.gateway.openai.unknown import UnknownFields
from moonshard.serving.gateway.pipeline.generation import Gateway
from moonshard.serving.gateway.pipeline.model import PromptLimit
from moonshard.serving.gateway.records.metrics import GatewayMetrics
from moonshard.serving.gateway.request import GenerationRequest
from moonshard.serving.gateway.responses.stored import StoredResponses
from moonshard.serving.observe.spans.context import TraceContext

READY_RETRY_AFTER_S = 1.0
GET = ("GET", "HEAD", "OPTIONS")
POST = ("POST", "OPTIONS")
KEPT = ("GET", "HEAD", "DELETE", "OPTIONS")
_NO_TELEMETRY: FastApiTelemetry = {"tracing": False, "metrics": False, "logs": False}  # the pipeline has its own spans
_CHAT = BodyDecoder(requests.ChatBody)
_COMPLETION = BodyDecoder(requests.CompletionBody)
_TOKENIZE = BodyDecoder(requests.TokenizeBody)
_DETOKENIZE = BodyDecoder(requests.DetokenizeBody)


class HttpFront:
    """The routes over one gateway. `app` is what a server serves."""

    def __init__(
        self,
        gateway: Gateway,
        metrics: GatewayMetrics,
        *,
        version: str,
        intake: Intake,
        unknown_fields: UnknownFields,
        tenants: Tenants,
        strangers: Strangers,
        stored: StoredResponses,
        batches: Batches | None = None,
        keep_alive_s: float = KEEP_ALIVE_S,
        is_background: bool = False,
    ) -> None:
        """`is_background`: for callers within the process, who wait for nothing. `batches`: None where they are off."""
        self._gateway = gateway
        self._metrics = metrics
        self._version = version
        self._bodies = Bodies(intake, unknown_fields, gateway.aside)
        self._answering = Answering(gateway, keep_alive_s=keep_alive_s, is_background=is_background)
        self._several = SeveralAnswering(gateway, self._answering.generate, keep_alive_s=keep_alive_s)
        self._tenants = tenants
        self._created = int(time.time())
        responses = ResponsesRoutes(gateway, self._bodies, self._answering, tenants, stored)
        messages = MessagesRoutes(gateway, self._bodies, self._answering, tenants)
        routes = {
            "/v1/chat/completions": (POST, self._keyed(self._chat)),
            "/v1/completions": (POST, self._keyed(self._complete)),
            "/v1/responses": (POST, self._keyed(responses.create)),
            "/v1/responses/{id:path}": (KEPT, self._keyed(responses.kept)),
            "/v1/messages": (POST, self._keyed(messages.create)),
            "/v1/messages/count_tokens": (POST, self._keyed(messages.count)),
            **self._all_keyed(batch_routes(batches, self._bodies, tenants)),
            "/v1/models": (GET, self._keyed(self._models)),
            "/v1/models/{name:path}": (GET, self._keyed(self._model)),
            "/tokenize": (POST, self._keyed(self._tokenize)),
            "/detokenize": (POST, self._keyed(self._detokenize)),
            "/health": (GET, self._health),
            "/ready": (GET, self._ready),
            "/metrics": (GET, self._prometheus),
            "/version": (GET, self._show_version),
        }
        fastapi = FastAPI(
            openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, telemetry=_NO_TELEMETRY
        )
        for path, (methods, handler) in routes.items():
            fastapi.add_api_route(path, _or_options(methods, handler), methods=list(methods))
        add_error_handlers(fastapi)
        self.app: ASGIApp = Edge(fastapi, metrics, frozenset(routes), strangers)

    def _keyed(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """The handler for callers whose key names a tenant. Nobody else's body is read."""

        async def keyed(request: Request) -> Response:
            check_key(self._tenants, header_of(request))
            return await handler(request)

        return keyed

    def _all_keyed(self, routes: dict[str, tuple[Methods, Handler]]) -> dict[str, tuple[Methods, Handler]]:
        return {path: (methods, self._keyed(handler)) for path, (methods, handler) in routes.items()}

    async def _chat(self, request: Request) -> Response:
        received_ns = time.perf_counter_ns()
        meant = partial(requests.chat_request, request_id=visible_id(request, "chatcmpl-"), received_ns=received_ns)
        body, asked = await self._bodies.read(_CHAT, request, meant)
        asked = replace(asked, caller=self._caller(request, body), parent=self._parent(request))
        envelope, is_streamed = self._envelope(asked, body), bool(body.stream)
        del body  # it may be large, and would be held until the answer ends
        tokenizer = self._gateway.model.tokenizer
        prompts = Prompts(tokenizer, AskedOfPrompts(num_prompt_logprobs=asked.num_prompt_logprobs))
        return await self._respond(request, asked, envelope, ChatFormat(tokenizer), prompts, is_streamed=is_streamed)

    async def _complete(self, request: Request) -> Response:
        received_ns = time.perf_counter_ns()
        meant = partial(requests.completion_requests, request_id=visible_id(request, "cmpl-"), received_ns=received_ns)
        body, several = await self._bodies.read(_COMPLETION, request, meant)
        caller, parent = self._caller(request, body), self._parent(request)
        several = [
            replace(asked, caller=caller.for_prompt(number), parent=parent) for number, asked in enumerate(several)
        ]
        first, tokenizer = several[0], self._gateway.model.tokenizer
        envelope, is_streamed = self._envelope(first, body), bool(body.stream)
        prompts = Prompts(tokenizer, requests.asked_of_prompts(body, first, len(several)))
        del body
        form = CompletionFormat(tokenizer, first.skip_special_tokens)
        if len(several) == 1:
            return await self._respond(request, first, envelope, form, prompts, is_streamed=is_streamed)
        envelope = replace(envelope, id=first.request_id.removesuffix("-0"))
        if is_streamed:
            return self._several.streamed(request, several, Chunks(envelope, form, prompts))
        return await self._several.whole(request, several, Whole(envelope, form, prompts))

    def _caller(self, request: Request, body: requests.GenerationBody) -> Caller:
        return read_caller(self._tenants, header_of(request), body.prompt_cache_key, body.user)

    def _parent(self, request: Request) -> TraceContext | None:
        return self._gateway.parent_of(request.headers.getlist)

    def _envelope(self, asked: GenerationRequest, body: requests.GenerationBody) -> Envelope:
        limits = self._gateway.pool.limits
        return Envelope(
            id=asked.request_id,
            model=self._gateway.model.name,
            fingerprint="" if limits is None else limits.fingerprint,
            has_logprobs=asked.num_logprobs is not None,
            has_token_ids=bool(body.return_token_ids),
            has_usage=bool(body.streaming.include_usage),
            has_running_usage=bool(body.streaming.continuous_usage_stats),
            is_padded=bool(body.streaming.include_obfuscation),
            has_timing=bool(body.return_timing),
        )

    async def _respond(
        self,
        request: Request,
        asked: GenerationRequest,
        envelope: Envelope,
        form: Format,
        prompts: Prompts,
        *,
        is_streamed: bool,
    ) -> Response:
        if is_streamed:
            return self._answering.streamed(request, asked, Chunks(envelope, form, prompts))
        return await self._answering.whole(request, asked, Whole(envelope, form, prompts))

    async def _tokenize(self, request: Request) -> Response:
        body, asked = await self._bodies.read(
            _TOKENIZE, request, requests.request_to_tokenize, num_contexts=TOKENIZED_CONTEXTS
        )
        self._gateway.model.check_name(body.model or "")
        max_model_len = self._gateway.limits().max_context_tokens
        counting = self._gateway.model.tokenize(asked, PromptLimit.to_tokenize(max_model_len))
        tokens = await until_disconnect(request.receive, counting)
        told = {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens}
        return large_answer(request, msgspec.json.encode(told))

    async def _detokenize(self, request: Request) -> Response:
        body, token_ids = await self._bodies.read(
            _DETOKENIZE, request, requests.ids_to_detokenize, num_contexts=TOKENIZED_CONTEXTS
        )
        self._gateway.model.check_name(body.model or "")
        most = TOKENIZED_CONTEXTS * self._gateway.limits().max_context_tokens
        telling = self._gateway.model.detokenize(token_ids, most, field="tokens")
        told = {"prompt": await until_disconnect(request.receive, telling)}
        return large_answer(request, msgspec.json.encode(told))

    async def _models(self, _request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model_object()]})

    async def _model(self, request: Request) -> Response:
        self._gateway.model.check_name(request.path_params["name"])
        return json_response(self._model_object())

    def _model_object(self) -> dict[str, object]:
        limits, name = self._gateway.pool.limits, self._gateway.model.name
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "moonshard",
            "root": name,
            "parent": None,
            "max_model_len": None if limits is None else limits.max_context_tokens,
        }

    async def _health(self, _request: Request) -> Response:
        """200 as long as the gateway lives; `degraded` where a worker is away, to which the gateway goes on trying to
        connect.
        """
        workers = self._gateway.pool.worker_states()
        is_whole = all(state == "ready" for state in workers.values())
        return json_response({"status": "ok" if is_whole else "degraded", "workers": workers})

    async def _ready(self, _request: Request) -> Response:
        """Whether requests can be served, and by which workers: they may be fewer than they should."""
        pool = self._gateway.pool
        if self._gateway.is_ready:
            return json_response({"status": "ready", "workers": pool.worker_states()})
        if self._gateway.is_draining:
            return error_response(Unavailable("draining", retry_after_s=READY_RETRY_AFTER_S))
        return error_response(pool.unavailable())

    async def _prometheus(self, _request: Request) -> Response:
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def _show_version(self, _request: Request) -> Response:
        return json_response({"version": self._version})


def _or_options(
    methods: tuple[str, ...], handler: Callable[[Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """The handler; OPTIONS says what may be asked, to whoever has a key or none."""

    async def answer(request: Request) -> Response:
        if request.method == "OPTIONS":
            return Response(None, 204, {"allow": ", ".join(methods)})
        return await handler(request)

    return answer
