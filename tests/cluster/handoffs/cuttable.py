"""A TCP proxy in the test's process, so that a connection can break while both of its ends live on.

It listens at the worker's own port, on another address of loopback: a proof of the cluster's key holds for the port.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

CHUNK_BYTES = 64 * 1024
HOST = "127.0.0.2"


class Cuttable:
    """Passes on what comes to `address`. Every method may be called from any thread."""

    def __init__(self, remote: str):
        self.address = ""
        self.is_listening = threading.Event()
        self._host, _, port = remote.rpartition(":")
        self._port = int(port)
        self._open: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """Breaks every connection in both directions; new ones are accepted."""
        asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result()

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Connections stay open, and nothing passes."""
        self._loop.call_soon_threadsafe(self._passes.clear)
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._passes.set)

    async def _cut(self) -> None:
        for writer in tuple(self._open):
            writer.transport.abort()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)

    async def serve(self) -> None:
        """Serves until `stop`; connections that are open then break."""
        self._loop, self._passes, self._stopped = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self._passes.set()
        server = await asyncio.start_server(self._accept, HOST, self._port)
        self.address = f"{HOST}:{self._port}"
        self.is_listening.set()
        await self._stopped.wait()
        server.close()
        await self._cut()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            remote_reader, remote_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, remote_writer}
        await asyncio.gather(self._pass_on(reader, remote_writer), self._pass_on(remote_reader, writer))
        self._open -= {writer, remote_writer}

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await self._passes.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


@contextmanager
def cuttable(remote: str) -> Iterator[Cuttable]:
    """A proxy to `remote` that runs inside the block, on a thread of its own."""
    proxy = Cuttable(remote)
    thread = threading.Thread(target=lambda: asyncio.run(proxy.serve()))
    thread.start()
    assert proxy.is_listening.wait(10)
    try:
        yield proxy
    finally:
        proxy.stop()
        thread.join()
