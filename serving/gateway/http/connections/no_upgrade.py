"""A parser that declines to change the protocol: a request that offers HTTP/2 or WebSocket is a request like any other.

Java's HTTP client offers HTTP/2 (`Upgrade: h2c`) with every request. The parser then takes what follows the head for
the other protocol, and a server that does not speak it would serve the request without its body.
Source: RFC 9110, section 7.8: a server may ignore the offer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import httptools

_FRAMING = (b"content-length", b"transfer-encoding")

type Headers = Sequence[tuple[bytes, bytes]]


class PlainParser:
    """Takes the place of httptools' parser. `listener` has its callbacks; `headers` gives those of the last head."""

    def __init__(self, listener: object, headers: Callable[[], Headers]) -> None:
        self._listener = listener
        self._headers = headers
        self._parser = _new_parser(listener)

    @property
    def is_offered(self) -> bool:
        """Whether a change of protocol is offered: the parser then takes the request to end with its head, while its
        body is still to come.
        """
        return self._parser.should_upgrade()

    def feed_data(self, data: bytes) -> None:
        """Raises HttpParserError."""
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                self._decline()
                data = data[offer.args[0] :]
                continue
            return

    def get_http_version(self) -> str:
        return self._parser.get_http_version()

    def get_method(self) -> bytes:
        return self._parser.get_method()

    def should_keep_alive(self) -> bool:
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        return False

    def _decline(self) -> None:
        """Goes on with a new parser, which reads the request's body, if any, after a head that offers nothing."""
        framing = b"".join(b"%b: %b\r\n" % line for line in self._headers() if line[0] in _FRAMING)
        self._parser = _new_parser(_Resumed(self._listener))
        self._parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")


class _Resumed:
    """Passes on to `listener` what the new parser finds behind its first head, which is one of our own making."""

    def __init__(self, listener: Any) -> None:
        self._listener = listener
        self._is_in_own_head = True

    def on_message_begin(self) -> None:
        if not self._is_in_own_head:
            self._listener.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_in_own_head:
            self._listener.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_own_head:
            self._listener.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._is_in_own_head:
            self._listener.on_headers_complete()
        self._is_in_own_head = False

    def on_body(self, body: bytes) -> None:
        self._listener.on_body(body)

    def on_message_complete(self) -> None:
        self._listener.on_message_complete()


def _new_parser(listener: object) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(listener)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's: what was pipelined is answered
    return parser
