"""A route of the HTTP front, asked within the process: no socket, and a tenant instead of a key.

So a batch's line meets the very checks, limits and answers of a request from outside.
"""

import asyncio
from dataclasses import dataclass

from starlette.types import ASGIApp, Message

from moonshard.serving.config.tenants import Tenant, Tenants, UnknownKey

_BEARER = "Bearer "


class NamedTenants(Tenants):
    """Takes the tenant's name for its key. For a front that nothing outside the process reaches."""

    def __init__(self) -> None:
        super().__init__(None)

    def of(self, authorization: str | None) -> Tenant:
        if authorization is None or not authorization.startswith(_BEARER):
            raise UnknownKey("no tenant was named")
        return Tenant(authorization.removeprefix(_BEARER))


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    status: int
    retry_after_s: float | None
    body: bytes

    @property
    def is_final(self) -> bool:
        """Whether to ask again makes no sense: it does where the server had no room, or nobody to do it."""
        return self.status != 503 and not (self.status == 429 and self.retry_after_s is not None)


async def ask(app: ASGIApp, path: str, tenant: str, request_id: str, body: bytes) -> Answer:
    """The whole answer. Cancelled, it ends the request as a client does that leaves."""
    headers = {
        "host": "localhost",
        "content-type": "application/json",
        "content-length": str(len(body)),
        "authorization": _BEARER + tenant,
        "x-request-id": request_id,
    }
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None,
        "server": ("localhost", 0),
    }
    exchange = _Exchange(body)
    await app(scope, exchange.receive, exchange.send)
    return exchange.answer()


class _Exchange:
    """The two ends of one request: its body, and what is answered."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._status = 500
        self._headers: dict[bytes, bytes] = {}
        self._parts: list[bytes] = []
        self._ended = asyncio.Event()

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._ended.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], dict(message["headers"])
            return
        self._parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            self._ended.set()

    def answer(self) -> Answer:
        after = self._headers.get(b"retry-after")
        return Answer(
            status=self._status,
            retry_after_s=None if after is None else float(after),
            body=b"".join(self._parts),
        )
