"""Which web pages may call this server from somebody's browser, and under which names it is called. Pure.

A browser sends a page's requests from inside its user's machine, so that listening on loopback keeps no page out: any
may POST to a server that asks for no key, and one whose own name resolves to 127.0.0.1 (DNS rebinding) may read the
answers. A page cannot choose what the browser writes into Host and Origin, so a server without keys on loopback takes
only names of loopback and its own pages there, unless more is allowed. Elsewhere only what is configured is checked.
Clients that are no browsers send no Origin. Source: the Fetch standard (CORS); RFC 6761 for `localhost`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moonshard.rpc.status import InvalidArgument, PermissionDenied
from moonshard.serving.config.loopback import is_loopback
from moonshard.serving.gateway.quoted import quoted

ANY = "*"
_DEFAULT_PORTS = {"http": 80, "https": 443}
MAX_PORT_DIGITS = 5
_MAX_QUOTED = 100  # characters of a name that is refused

type Values = Callable[[str], Sequence[str]]  # all values of a header


@dataclass(frozen=True, kw_only=True, slots=True)
class Strangers:
    """Which hosts and origins may call. `is_guarded`: whether they are checked where nothing is configured. `port` is
    where the server listens.
    """

    allowed_origins: frozenset[str]
    allowed_hosts: frozenset[str]  # with or without a port
    is_guarded: bool
    port: int

    def check(self, values: Values) -> None:
        """InvalidArgument for two Hosts or Origins, PermissionDenied for one that may not."""
        host, origin = _only(values, "host"), _only(values, "origin")
        if host is not None and (self.is_guarded or self.allowed_hosts):
            self._check_host(host.lower())
        if origin is not None and (self.is_guarded or self.allowed_origins):
            self._check_origin(origin, (host or "").lower())

    def readable_by(self, origin: str) -> str | None:
        """The value of Access-Control-Allow-Origin; None where a page from there may not read answers."""
        if ANY in self.allowed_origins:
            return ANY
        return origin if origin in self.allowed_origins else None

    def _check_host(self, host: str) -> None:
        name, _ = _name_and_port(host)
        if not ({ANY, host, name} & self.allowed_hosts or is_loopback_name(name)):
            raise PermissionDenied(
                f"this server is not called {quoted(host)}; gateway.allowed_hosts says what it may be called",
                field="host",
            )

    def _check_origin(self, origin: str, host: str) -> None:
        if self.readable_by(origin) is None and not self._is_own(origin, host):
            raise PermissionDenied(
                f"pages from {quoted(origin)} may not call this server; gateway.allowed_origins says which may",
                field="origin",
            )

    def _is_own(self, origin: str, host: str) -> bool:
        """Whether the page was served by this server, or by a proxy before it: its origin is where the request goes."""
        scheme, _, place = origin.lower().partition("://")
        name, port = _name_and_port(place)
        if not place or scheme not in _DEFAULT_PORTS:
            return False
        is_here = is_loopback_name(name) and (port or _DEFAULT_PORTS[scheme]) == self.port
        return is_here or place == host


def is_loopback_name(name: str) -> bool:
    """Whether a name is loopback's, without asking a resolver: its addresses, and the names that RFC 6761 reserves for
    it.
    """
    name = name.strip("[]").removesuffix(".")
    return is_loopback(name) or name.endswith(".localhost")


def _only(values: Values, name: str) -> str | None:
    found = values(name)
    if len(found) > 1:
        raise InvalidArgument(f"{name} is given {len(found)} times", field=name)
    return found[0] if found else None


def _name_and_port(host: str) -> tuple[str, int | None]:
    """The parts of `name`, `name:port` or `[address]:port`; an address keeps its brackets."""
    name, colon, port = host.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= MAX_PORT_DIGITS
    if colon and is_port and (":" not in name or name.endswith("]")):
        return name, int(port)
    return host, None
