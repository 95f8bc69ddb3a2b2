"""gRPC calls frame by frame, for what no client library sends: a call without its message, or with half of it.

Source: RFC 9113, section 4.1 (frames); RFC 7541, section 6.2.2 (literal fields); gRPC over HTTP/2.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

DATA, HEADERS, SETTINGS = 0x0, 0x1, 0x4
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
FRAME_BYTES = 1 << 14


class RawGrpc:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def begin(self, stream: int, path: str, *, is_last: bool = False) -> None:
        """The head of a call; with `is_last` nothing follows."""
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost"}
        fields |= {"te": "trailers", "content-type": "application/grpc"}
        flags = END_HEADERS | (END_STREAM if is_last else 0)
        await self._send(HEADERS, flags, stream, b"".join(_literal(*field) for field in fields.items()))

    async def message_start(self, stream: int, announced: int, data: bytes) -> None:
        """`data`: its first bytes, of as many as announced."""
        await self.more(stream, b"\0" + announced.to_bytes(4, "big") + data)

    async def more(self, stream: int, data: bytes) -> None:
        for start in range(0, len(data), FRAME_BYTES):
            await self._send(DATA, 0, stream, data[start : start + FRAME_BYTES])

    async def ended(self) -> tuple[int, bytes]:
        """The next stream that the server ends, with its last headers as they are on the wire."""
        while True:
            head = await self._reader.readexactly(9)
            payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
            if kind == HEADERS and flags & END_STREAM:
                return stream, payload
            if kind == SETTINGS and not flags:
                await self._send(SETTINGS, ACK, 0, b"")

    async def _send(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
        self._writer.write(head + payload)
        await self._writer.drain()


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[RawGrpc]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        raw = RawGrpc(reader, writer)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        await raw._send(SETTINGS, 0, 0, b"")
        yield raw
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def field(number: int, content: bytes) -> bytes:
    """A protobuf field with a length: a string, a message or packed numbers."""
    length, groups = len(content), bytearray()
    while length > 0x7F:
        groups.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([number << 3 | 2, *groups, length]) + content


def _literal(name: str, value: str) -> bytes:
    return b"\0" + b"".join(bytes((len(text),)) + text.encode() for text in (name, value))
