"""What a browser is told of an answer that a page of another origin has asked for: CORS, by the Fetch standard.

Who may ask at all is `strangers`. Cookies are never allowed: whoever calls shows a key, or none is asked for.
"""

from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.responses import Response

from moonshard.serving.gateway.http.strangers import ANY, Strangers

METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
MAX_AGE_S = 600  # for which a browser does not ask again
_READABLE = ("x-request-id", "retry-after", "x-moonshard-")  # starts of names

type RawHeaders = list[tuple[bytes, bytes]]


def preflight_response(strangers: Strangers, headers: Headers) -> Response | None:
    """The answer to a browser that asks first, whatever the path; None where there is nothing to allow."""
    origin, method = headers.get("origin"), headers.get("access-control-request-method")
    if origin is None or method is None or strangers.readable_by(origin) is None:
        return None
    allowed = {"access-control-allow-methods": METHODS, "access-control-max-age": str(MAX_AGE_S)}
    if asked := headers.get("access-control-request-headers"):
        allowed["access-control-allow-headers"] = asked
    if "access-control-request-private-network" in headers:  # of a public page, to a server on a private network
        allowed["access-control-allow-private-network"] = "true"
    return Response(None, 204, allowed)


def readable_headers(strangers: Strangers, headers: Headers, answer: Iterable[tuple[bytes, bytes]]) -> RawHeaders:
    """Headers to add to an answer with these headers: that the page may read it, and which of our own headers it may
    read.
    """
    varies = strangers.allowed_origins and ANY not in strangers.allowed_origins
    added: RawHeaders = [(b"vary", b"origin")] if varies else []
    origin = headers.get("origin")
    if origin is None or (allowed := strangers.readable_by(origin)) is None:
        return added
    ours = [name.decode() for name, _ in answer if name.decode().startswith(_READABLE)]
    return [
        *added,
        (b"access-control-allow-origin", allowed.encode()),
        (b"access-control-expose-headers", ", ".join(ours).encode()),
    ]
