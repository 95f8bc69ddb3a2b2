"""The routes of Anthropic's Messages API."""

import time
from dataclasses import replace
from functools import partial

from fastapi import Request
from starlette.responses import Response

from moonshard.serving.config.tenants import Tenants
from moonshard.serving.gateway.caller import read_caller
from moonshard.serving.gateway.http.answering import Answering
from moonshard.serving.gateway.http.disconnect import until_disconnect
from moonshard.serving.gateway.http.edge import header_of, visible_id
from moonshard.serving.gateway.http.errors import json_response, late_headers
from moonshard.serving.gateway.http.reading import Bodies
from moonshard.serving.gateway.intake.bounds import TOKENIZED_CONTEXTS
from moonshard.serving.gateway.messages.answers import ID_PREFIX, PING, Answer, Events, Whole
from moonshard.serving.gateway.messages.body import COUNT_DECODER, DECODER
from moonshard.serving.gateway.messages.requests import message_request
from moonshard.serving.gateway.pipeline.generation import Gateway
from moonshard.serving.gateway.pipeline.model import PromptLimit


class MessagesRoutes:
    def __init__(self, gateway: Gateway, bodies: Bodies, answering: Answering, tenants: Tenants) -> None:
        self._gateway = gateway
        self._bodies = bodies
        self._answering = answering
        self._tenants = tenants

    async def create(self, request: Request) -> Response:
        received_ns = time.perf_counter_ns()
        message_id = visible_id(request, ID_PREFIX)
        meant = partial(message_request, request_id=message_id, received_ns=received_ns)
        body, asked = await self._bodies.read(DECODER, request, meant)
        user = None if body.metadata is None else body.metadata.user_id
        caller = read_caller(self._tenants, header_of(request), None, user)
        asked = replace(asked, caller=caller, parent=self._gateway.parent_of(request.headers.getlist))
        is_streamed = bool(body.stream)
        del body  # it may be large, and would be held until the answer ends
        answer = Answer(message_id, self._gateway.model.name)
        if is_streamed:
            return self._answering.streamed(request, asked, Events(answer), keep_alive=PING)
        return await self._answering.whole(request, asked, Whole(answer))

    async def count(self, request: Request) -> Response:
        meant = partial(message_request, request_id="", received_ns=0)
        body, asked = await self._bodies.read(COUNT_DECODER, request, meant, num_contexts=TOKENIZED_CONTEXTS)
        self._gateway.model.check_name(body.model or "")
        limit = PromptLimit.to_tokenize(self._gateway.limits().max_context_tokens)
        tokens = await until_disconnect(request.receive, self._gateway.model.tokenize(asked, limit))
        return json_response({"input_tokens": len(tokens)}, headers=late_headers(request))
