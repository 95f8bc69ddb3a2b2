"""Whether a client that will send nothing more still listens.

TCP says the same of a client that has only ended its side (`shutdown(SHUT_WR)`, `nc -N`) and of one that has left: its
side is ended. Only a byte sent to it tells: a machine answers with a reset where nobody listens any more, and the write
after that fails, by which the protocol notices that the connection is lost. So bytes that come next in any case are
sent ahead of their time: every answer begins with `HTTP/1.1 `, and the size of a chunk may begin with zeros. In the
middle of a body that is not chunked nothing can be sent ahead, since only the body itself can come; its next bytes
tell.
Source: RFC 9112, sections 4 and 7.1 (`chunk-size = 1*HEXDIG`, `last-chunk = 1*("0")`).
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

START = b"HTTP/1.1 "
FIRST_DELAY_S = 0.01
GROWTH = 4  # of the delay: who left is noticed within some four times its round trip; the last byte goes after 55 s
NUM_PROBES = len(START) - 1


class Probe:
    """Asks about the client of `cycle` from now on, until `stop` or until its bytes are used up."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self._loop = loop
        self._transport = transport
        self._num_sent = 0
        self._delay_s = FIRST_DELAY_S
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, cycle: RequestResponseCycle) -> None:
        """Begins to ask, and begins anew where it is the next request's turn."""
        self.stop()
        self._num_sent, self._delay_s = 0, FIRST_DELAY_S
        self._ask(cycle)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ask(self, cycle: RequestResponseCycle) -> None:
        if self._num_sent == NUM_PROBES or cycle.response_complete or self._transport.is_closing():
            return
        if not cycle.response_started:
            self._send_start(cycle)
        elif cycle.chunked_encoding:
            self._transport.write(b"0")
        self._num_sent += 1
        self._timer = self._loop.call_later(self._delay_s, self._ask, cycle)
        self._delay_s *= GROWTH

    def _send_start(self, cycle: RequestResponseCycle) -> None:
        begun = cycle.transport
        if not isinstance(begun, Begun):
            cycle.transport = begun = Begun(self._transport)
        begun.send_ahead()


class Begun(asyncio.Transport):
    """A transport that can send the first bytes of an answer before the answer is there."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._num_ahead = 0

    def send_ahead(self) -> None:
        """Sends one more byte of the answer ahead of it."""
        self._transport.write(START[self._num_ahead : self._num_ahead + 1])
        self._num_ahead += 1

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._transport.write(data[self._num_ahead :])
        self._num_ahead = 0

    def close(self) -> None:
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()
