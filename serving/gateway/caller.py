"""Who calls, under which affinity key, and by which name the request may be asked again: read off headers or metadata,
whichever front they came through.

Agents send their session's name under many headers; the first that is there counts. A name is opaque and may be
anything, so it is hashed at once, with its tenant, and is an affinity key from then on.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import grpc

from moonshard.rpc.status import InvalidArgument, Unauthenticated
from moonshard.serving.config.tenants import DEFAULT, Tenant, Tenants, UnknownKey
from moonshard.serving.control.routing.pins import affinity_key

SESSION_NAMES = (
    "x-session-affinity",  # Cloudflare, OpenCode and others
    "x-session-id",
    "x-claude-code-session-id",
    "session-id",  # Codex, in two spellings
    "session_id",
    "x-grok-conv-id",
)
BODY_NAMES = ("prompt_cache_key", "user")
MAX_SESSION_CHARS = 1 << 14  # it is hashed on the event loop
IDEMPOTENCY_HEADER = "idempotency-key"  # of HTTP: the IETF's draft of that name, and Stripe's
IDEMPOTENCY_METADATA = "x-request-id"  # of gRPC: what retries of one call have in common
_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,256}")
_KEY = "authorization"
_BARE_KEY = "x-api-key"  # Anthropic's; where both are given, the other counts
_SINGLE = frozenset({_KEY, _BARE_KEY, IDEMPOTENCY_HEADER, IDEMPOTENCY_METADATA})
ANYBODY = Tenant(DEFAULT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    tenant: Tenant = ANYBODY
    affinity_key: bytes | None = None  # hashed
    idempotency_key: str | None = None  # by which the request may be asked again, of any gateway

    def for_prompt(self, number: int) -> "Caller":
        """Of several prompts of one body: each draws its own tokens, asked again too."""
        if self.idempotency_key is None or number == 0:
            return self
        return replace(self, idempotency_key=f"{self.idempotency_key} {number}")  # no client's key has a blank


def read_caller(
    tenants: Tenants,
    header: Callable[[str], str | None],
    *body_names: str | None,
    idempotency: str = IDEMPOTENCY_HEADER,
) -> Caller:
    """`header` gives a header's value by its lower-case name; `body_names`, the values of `BODY_NAMES`, come
    after all headers. `idempotency`: the header that names a request.

    Raises as `check_key` and `header`; InvalidArgument for a name that is too long, or no name of a request.
    """
    tenant = check_key(tenants, header)
    names = zip((*SESSION_NAMES, *BODY_NAMES), (*map(header, SESSION_NAMES), *body_names), strict=False)
    field, name = next(((field, name) for field, name in names if name), (None, None))
    if name is not None and len(name) > MAX_SESSION_CHARS:
        raise InvalidArgument(f"{field}: at most {MAX_SESSION_CHARS} characters, not {len(name)}", field=field)
    return Caller(
        tenant=tenant,
        affinity_key=None if name is None else affinity_key(tenant.name, name),
        idempotency_key=_idempotency_key(header, idempotency),
    )


def _idempotency_key(header: Callable[[str], str | None], name: str) -> str | None:
    key = header(name)
    if key is not None and not _IDEMPOTENCY_KEY.fullmatch(key):
        raise InvalidArgument(f"{name}: 1 to 256 characters of ASCII, without blanks", field=name)
    return key


def check_key(tenants: Tenants, header: Callable[[str], str | None]) -> Tenant:
    """Unauthenticated for a key that names no tenant."""
    key = header(_KEY)
    if not key and (bare := header(_BARE_KEY)):
        key = f"Bearer {bare}"
    try:
        return tenants.of(key)
    except UnknownKey as error:
        raise Unauthenticated(str(error)) from error


def first_values(values: Callable[[str], Sequence[str]]) -> Callable[[str], str | None]:
    """The first value of a name, or None. InvalidArgument for two keys of one kind: proxies and we might take different
    ones.
    """

    def header(name: str) -> str | None:
        found = values(name)
        if name in _SINGLE and len(found) > 1:
            raise InvalidArgument(f"{name} is given {len(found)} times", field=name)
        return found[0] if found else None

    return header


def metadata_value(context: grpc.aio.ServicerContext) -> Callable[[str], str | None]:
    """Gives a gRPC call's metadata by name, as `first_values`."""
    return first_values(metadata_values(context))


def metadata_values(context: grpc.aio.ServicerContext) -> Callable[[str], list[str]]:
    """As `metadata_value`, but with all values of a name, which may come more than once."""
    metadata = context.invocation_metadata() or ()
    return lambda name: [_text(value) for key, value in metadata if key == name]


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
