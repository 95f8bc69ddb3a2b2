"""uvicorn's HTTP protocol with an end to all waiting for a client: a head's bytes, a request's time, idle connections.

The parser keeps line and headers until they are complete, however long they grow and however slowly they come; uvicorn
has a limit for neither with this parser, nor for bodies. How many bytes a body may have is `edge`'s to bound. No limit
here touches a request that is complete: however long its answer takes, only its client ends it early.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import httptools
import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from moonshard.rpc.status import InvalidArgument, RequestError, RequestTimeout, Unavailable, advice, openai_error
from moonshard.serving.gateway.http.connections.half_closed import Probe
from moonshard.serving.gateway.http.connections.http_1_0 import framed_as_1_0
from moonshard.serving.gateway.http.connections.no_upgrade import PlainParser
from moonshard.serving.gateway.http.connections.waiting import Connections, Waiting

MAX_PIPELINED = 16  # requests behind the one that is being answered
MARK_BYTES = 4  # of a header's line besides its name and value
MAX_HEAD_BYTES = 256 * 1024  # at least one read of the socket, which may also hold the end of an earlier body
MIN_BODY_BYTES_PER_S = 8 * 1024  # a body that comes no slower has as long as it needs
LINGER_S = 5.0  # for the rest of a body that was refused: closed at once, its client might not see the answer
FLUSH_S = 60.0  # for the end of an answer to be read, on a connection that closes after it
ROOM_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """How long a client is waited for."""

    keep_alive_s: float  # for its next request
    head_s: float  # for a head to be complete
    body_s: float  # for its body, beside what `MIN_BODY_BYTES_PER_S` gives it


class HttpConfig(uvicorn.Config):
    """uvicorn's configuration, and what `FrontProtocol` keeps."""

    def __init__(self, app: ASGIApp, *, timeouts: Timeouts, connections: Connections, **more: Any) -> None:
        super().__init__(app, http=FrontProtocol, **more)
        self.timeouts = timeouts
        self.connections = connections


class Awaited(Enum):
    """What a connection waits for."""

    HEAD = auto()  # a request's head, or the first byte of all
    BODY = auto()
    ANSWER = auto()  # ours: its request is complete
    REST = auto()  # of a body that was answered already
    IDLE = auto()


class FrontProtocol(HttpToolsProtocol):
    """Errors that the parser or the clock finds are answered in the API's shape, and end the connection."""

    def __init__(
        self,
        config: HttpConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.parser: Any = PlainParser(self, lambda: self.headers)
        self._timeouts = config.timeouts
        self._waiting = config.connections
        self._phase: Awaited | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_in_head = self._is_in_body = False
        self._num_head_bytes = self._num_body_bytes = 0
        self._began_s = 0.0  # waiting in this phase, by the loop's clock
        self._is_deaf = False  # to what follows a request that is being answered
        self._answering: RequestResponseCycle | None = None
        self._probe: Probe | None = None  # of a client that has ended its side

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._settle()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._wait_in(None)
        self._cancel_timer()
        if self._probe is not None:
            self._probe.stop()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        super().data_received(data)
        if not self._is_in_head:
            return
        self._num_head_bytes += len(data)
        self._check_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers of a chunked body come here too: they are bounded as a head is, and ignored."""
        if self._is_in_head:
            super().on_header(name, value)
            return
        self._num_head_bytes += len(name) + len(value) + MARK_BYTES
        self._check_head()

    def _check_head(self) -> None:
        if self._num_head_bytes > MAX_HEAD_BYTES and not self._is_deaf and not self.transport.is_closing():
            self.send_400_response("The request's head is too large.")
            self._is_deaf = True

    def eof_received(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]  # uvicorn's says None: close
        """Whether the connection stays open, which it does for the answer to a request that is complete."""
        if self._phase is not Awaited.ANSWER or self._answering is None:
            return False
        self.cycle.keep_alive = False
        if self._probe is None:
            self._probe = Probe(self.loop, self.transport)
            self._probe.begin(self._answering)
        return True

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._num_head_bytes = True, 0
        self._settle()

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise httptools.HttpParserError("too many requests wait behind one that is being answered")
        self._is_in_head, self._is_in_body, self._num_body_bytes = False, True, 0
        super().on_headers_complete()
        self._settle()

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.is_offered:
            return
        self._is_in_body = False
        super().on_message_complete()
        self._settle()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._flush()
        else:
            self._settle()

    def give_way(self) -> None:
        """Closes this connection, which waits for its client, to make room for a newer one."""
        self._end(Unavailable("too many connections are waiting", retry_after_s=ROOM_RETRY_AFTER_S))

    def send_400_response(self, msg: str) -> None:
        """A request that is being answered is answered to its end; what follows it on the connection is then not
        read.
        """
        if self._phase is Awaited.ANSWER:
            self._is_deaf = True
            self.cycle.keep_alive = False
        else:
            self._refuse(InvalidArgument(msg))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        if self._probe is not None and not self._is_cut(cycle):
            self._probe.begin(cycle)
        framed: Any = framed_as_1_0(cycle, app) if cycle.scope["http_version"] == "1.0" else app
        super()._start_asgi_task(cycle, framed)

    def _is_cut(self, cycle: RequestResponseCycle) -> bool:
        """Whether the client has ended its side amid this request."""
        return self._probe is not None and self._is_in_body and cycle is self.cycle

    def _settle(self) -> None:
        """Sets the timer for what the connection waits for now. Where that is the same as before, the timer is not set
        anew.
        """
        phase = self._what_is_missing()
        if phase is self._phase or self.transport.is_closing():
            return
        if self._probe is not None and phase is not Awaited.ANSWER:
            self._close()  # nothing more can come
            return
        self._phase, self._began_s = phase, self.loop.time()
        self._cancel_timer()
        match phase:
            case Awaited.ANSWER:
                self._wait_in(None)
            case Awaited.IDLE:  # uvicorn's own timer ends with any byte, be it a mere line end
                self._wait_in(self._waiting.idle)
                self._wait(self._timeouts.keep_alive_s)
            case _:
                self._wait_in(self._waiting.half_open)
                delays_s = {Awaited.HEAD: self._timeouts.head_s, Awaited.BODY: self._timeouts.body_s}
                self._wait(delays_s.get(phase, LINGER_S))

    def _what_is_missing(self) -> Awaited:
        if self.cycle is not None and not self.cycle.response_complete:
            is_first = not self.pipeline  # else an earlier one is being answered
            return Awaited.BODY if self._is_in_body and is_first else Awaited.ANSWER
        if self._is_in_head or self.cycle is None:
            return Awaited.HEAD
        return Awaited.REST if self._is_in_body else Awaited.IDLE

    def _wait_in(self, ours: Waiting | None) -> None:
        for waiting in (self._waiting.idle, self._waiting.half_open):
            if waiting is not ours:
                waiting.discard(self)
        if ours is not None:
            ours.add(self)

    def _wait(self, delay_s: float) -> None:
        self._timer = self.loop.call_later(delay_s, self._time_over)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_over(self) -> None:
        if self._phase is Awaited.BODY and (more_s := self._more_time_s()) > 0:
            self._wait(more_s)
        else:
            self._end(RequestTimeout(f"the {'body' if self._is_in_body else 'head'} took too long to arrive"))

    def _more_time_s(self) -> float:
        """The time that a body still gets: what its bytes have earned, and all of it anew where this side did not
        read.
        """
        if self.flow.read_paused:
            self._began_s = self.loop.time()
        earned_s = self._timeouts.body_s + self._num_body_bytes / MIN_BODY_BYTES_PER_S
        return self._began_s + earned_s - self.loop.time()

    def _end(self, error: RequestError) -> None:
        """Ends the connection, with an error answer where a request has begun."""
        if self._is_in_head or self._phase is Awaited.BODY:
            self._refuse(error)
        else:
            self._close()

    def _refuse(self, error: RequestError) -> None:
        """Answers with an error without the app, which may not know of the request."""
        if self.transport.is_closing():
            return
        is_answered = self._phase is Awaited.REST or (self._phase is Awaited.BODY and self.cycle.response_started)
        if not is_answered:
            self.transport.write(_whole_response(error))
        self._close()

    def _close(self) -> None:
        self.transport.close()
        self._flush()

    def _flush(self) -> None:
        """What was written still goes out; but a client that reads nothing would keep us waiting for ever."""
        self._wait_in(None)
        self._cancel_timer()
        self._timer = self.loop.call_later(FLUSH_S, self.transport.abort)


def _whole_response(error: RequestError) -> bytes:
    body = msgspec.json.encode(openai_error(error))
    headers: Mapping[str, str] = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **advice(error),
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return STATUS_LINE[error.http_status] + f"{lines}\r\n".encode() + body
