"""A body to what it means, for every route that takes one: read within bounds, decoded, and unknown fields told.

What is long is done beside the event loop, and given up where the client leaves meanwhile.
"""

from collections.abc import Callable

import msgspec
from fastapi import Request

from moonshard.serving.gateway.aside import MAX_INLINE_SIZE, Aside
from moonshard.serving.gateway.http.disconnect import until_disconnect
from moonshard.serving.gateway.http.edge import read_body
from moonshard.serving.gateway.http.errors import late_headers
from moonshard.serving.gateway.intake.bounds import Intake
from moonshard.serving.gateway.intake.large_bodies import LARGE_BYTES, LARGE_CONTENTS_BYTES, LargeBodies
from moonshard.serving.gateway.openai.body import BodyDecoder
from moonshard.serving.gateway.openai.unknown import UnknownFields


class Bodies:
    """Reads the bodies of one front."""

    def __init__(self, intake: Intake, unknown_fields: UnknownFields, aside: Aside) -> None:
        self._intake = intake
        self._unknown_fields = unknown_fields
        self._aside = aside
        self._large_bodies = LargeBodies()

    async def read[T: msgspec.Struct, M](
        self, decoder: BodyDecoder[T], request: Request, meant: Callable[[T], M], *, num_contexts: int = 1
    ) -> tuple[T, M]:
        """The decoded body, and what it means by `meant`. Unknown fields are named in the answer's headers, or
        refused.
        """
        body, num_bytes = await self.decoded(decoder, request, num_contexts=num_contexts)
        return body, await self.meaning(request, num_bytes, meant, body)

    async def decoded[T: msgspec.Struct](
        self, decoder: BodyDecoder[T], request: Request, *, num_contexts: int = 1
    ) -> tuple[T, int]:
        """As `read`: the body, and how many bytes it was."""
        sent, contents = await read_body(request, self._intake, num_contexts=num_contexts)
        if len(sent) <= LARGE_BYTES and contents.num_bytes <= LARGE_CONTENTS_BYTES:
            body, unknown = decoder.decode(sent)
        else:
            body, unknown = await until_disconnect(request.receive, self._large_bodies.decode(decoder, sent))
        self._unknown_fields.tell(unknown, late_headers(request))
        return body, len(sent)

    async def meaning[T, M](self, request: Request, num_bytes: int, meant: Callable[[T], M], body: T) -> M:
        """As `read`: what a body of so many bytes means."""
        if num_bytes <= MAX_INLINE_SIZE:
            return meant(body)
        return await until_disconnect(request.receive, self._aside.run(num_bytes, meant, body))
