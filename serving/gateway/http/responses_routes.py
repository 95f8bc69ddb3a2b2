"""The routes of OpenAI's Responses API."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from fastapi import Request
from starlette.responses import Response

from moonshard.rpc.status import InvalidArgument
from moonshard.serving.config.tenants import Tenant, Tenants
from moonshard.serving.gateway.blocks import Blocks
from moonshard.serving.gateway.caller import check_key, read_caller
from moonshard.serving.gateway.http.answering import Answering
from moonshard.serving.gateway.http.edge import header_of, large_answer, visible_id
from moonshard.serving.gateway.http.errors import json_response
from moonshard.serving.gateway.http.reading import Bodies
from moonshard.serving.gateway.openai.messages import Message
from moonshard.serving.gateway.pipeline.generation import Gateway
from moonshard.serving.gateway.request import GenerationRequest
from moonshard.serving.gateway.responses.answers import ID_PREFIX, Answer, Envelope, Whole
from moonshard.serving.gateway.responses.body import DECODER, ResponsesBody
from moonshard.serving.gateway.responses.events import Events
from moonshard.serving.gateway.responses.items import messages_of
from moonshard.serving.gateway.responses.requests import response_request
from moonshard.serving.gateway.responses.stored import Stored, StoredResponses

PREVIOUS, ID = "previous_response_id", "id"
_ID_BYTES = 4  # of what is put behind the exchange's id, which is the client's own where it gave one


class ResponsesRoutes:
    def __init__(
        self, gateway: Gateway, bodies: Bodies, answering: Answering, tenants: Tenants, stored: StoredResponses
    ) -> None:
        self._gateway = gateway
        self._bodies = bodies
        self._answering = answering
        self._tenants = tenants
        self._stored = stored

    async def create(self, request: Request) -> Response:
        received_ns = time.perf_counter_ns()
        body, num_bytes = await self._bodies.decoded(DECODER, request)
        caller = read_caller(self._tenants, header_of(request), body.prompt_cache_key, body.user)
        earlier = self._earlier(caller.tenant, body.previous_response_id)
        response_id = f"{visible_id(request, ID_PREFIX)}_{secrets.token_hex(_ID_BYTES)}"
        meant = partial(_meant, earlier=earlier.messages, request_id=response_id, received_ns=received_ns)
        said, asked = await self._bodies.meaning(request, num_bytes + earlier.num_bytes, meant, body)
        asked = replace(asked, caller=caller, parent=self._gateway.parent_of(request.headers.getlist))
        answer = self._answer(body, caller.tenant, [*earlier.messages, *said], response_id)
        is_streamed = bool(body.stream)
        del body, earlier, said  # they may be large, and would be held until the answer ends
        if is_streamed:
            return self._answering.streamed(request, asked, Events(answer))
        return await self._answering.whole(request, asked, Whole(answer))

    async def kept(self, request: Request) -> Response:
        """GET and DELETE of one that is stored."""
        tenant = check_key(self._tenants, header_of(request))
        response_id = request.path_params[ID]
        if request.method == "DELETE":
            self._stored.delete(tenant, response_id, field=ID)
            return json_response({"id": response_id, "object": "response", "deleted": True})
        if request.query_params.get("stream") not in (None, "false"):
            raise InvalidArgument("stream is supported only where a response is created", field="stream")
        return large_answer(request, self._stored.get(tenant, response_id, field=ID).response)

    def _earlier(self, tenant: Tenant, previous_id: str | None) -> Stored:
        """NotFound for one that is not kept for this tenant."""
        return Stored(b"", ()) if not previous_id else self._stored.get(tenant, previous_id, field=PREVIOUS)

    def _answer(self, body: ResponsesBody, tenant: Tenant, said: Sequence[Message], response_id: str) -> Answer:
        is_stored = body.store is not False and self._stored.max_stored > 0
        envelope = Envelope.of(body, response_id=response_id, model=self._gateway.model.name, is_stored=is_stored)
        if not is_stored:
            return Answer(envelope, lambda _blocks, _response: None)

        def keep(blocks: Blocks, response: bytes) -> None:
            self._stored.keep(tenant, response_id, Stored(response, (*said, blocks.message())))

        return Answer(envelope, keep)


def _meant(
    body: ResponsesBody, *, earlier: Sequence[Message], request_id: str, received_ns: int
) -> tuple[list[Message], GenerationRequest]:
    """The messages of its input, and the request."""
    said = messages_of(body.input)
    return said, response_request(body, earlier, said, request_id=request_id, received_ns=received_ns)
