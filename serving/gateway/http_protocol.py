"""uvicorn's HTTP protocol with an end to a request's head.

The parser keeps line and headers until they are complete, however long they grow, and no limit of uvicorn's speaks of
them with this parser. Bodies are `edge`'s to bound.
"""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 256 * 1024  # at least one read of the socket, which may also hold the end of an earlier body


class BoundedHttpProtocol(HttpToolsProtocol):
    """Answers 400 and closes the connection when a head grows beyond `MAX_HEAD_BYTES`."""

    _is_in_head = False
    _num_head_bytes = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_in_head:
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request's head is too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._num_head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()
