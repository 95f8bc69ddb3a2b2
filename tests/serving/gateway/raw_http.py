"""HTTP as bytes, for what no client library sends."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from moonshard.serving.gateway.process import RunningGateway


@dataclass(frozen=True, slots=True)
class Raw:
    """One HTTP connection, as bytes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> "RawAnswer":
        """One answer, whose length is stated or ends with its connection."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
        length = headers.get("content-length")
        body = await (self.reader.read() if length is None else self.reader.readexactly(int(length)))
        return RawAnswer(lines[0], headers, body)


@dataclass(frozen=True, slots=True)
class RawAnswer:
    line: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def status(self) -> int:
        return int(self.line.split()[1])

    @property
    def error(self) -> Mapping[str, str | None]:
        return json.loads(self.body)["error"]


@asynccontextmanager
async def connected(running: RunningGateway) -> AsyncIterator[Raw]:
    host, port = running.http.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()


def post(path: str, body: object, *lines: str, version: str = "1.1") -> bytes:
    content = json.dumps(body).encode()
    head = "".join(f"{line}\r\n" for line in ("Host: localhost", f"Content-Length: {len(content)}", *lines))
    return f"POST {path} HTTP/{version}\r\n{head}\r\n".encode() + content
