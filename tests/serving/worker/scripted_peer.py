"""A gateway and a prefill worker in one, played by a test against real worker processes, message by message.

Writes into a decode worker's slab with a real transport, whatever the test wants to be there: the bytes are random,
since whether they are KV is nothing that a worker could tell.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np

from moonshard.kv.mooncake import MooncakeConfig, MooncakeTransport
from moonshard.kv.slab import Slab
from moonshard.rpc import link_pb2
from moonshard.rpc.link import PROTOCOL_VERSION
from moonshard.serving.transfer.endpoint import Place, endpoint_from
from moonshard.serving.transfer.plane import KvPlane
from tests.dialling import open_link
from tests.kv.slab_checksums import checksums

ANSWER_TIMEOUT_S = 20.0
NUM_SLOTS = 4


class Writer:
    """A prefill worker's end of the KV plane, and its epoch. One for each process of tests: Mooncake stays loaded."""

    def __init__(self, endpoint: link_pb2.KvEndpoint):
        remote = endpoint_from(endpoint)
        self.epoch = secrets.token_bytes(16)
        self._slab = Slab(NUM_SLOTS, remote.regions[Place(0, 0)].cell_bytes)
        self._plane = KvPlane(
            MooncakeTransport.start("127.0.0.1", config=MooncakeConfig()),
            self._slab,
            name="mooncake",
            layout=remote.layout,
            fingerprint=remote.fingerprint,
            num_partitions=1,
        )

    async def write(self, endpoint: link_pb2.KvEndpoint, target_cells: Sequence[int], damage: str = "") -> list[int]:
        """Write random blocks into these cells; the checksums of what should be there. `damage`: what is, instead."""
        cells = range(len(target_cells))
        for cell in cells:
            self._slab.cell(cell)[:] = np.frombuffer(secrets.token_bytes(self._slab.cell_bytes), np.uint8)
        expected = list(checksums(self._slab, cells))
        match damage:
            case "one byte":
                self._slab.cell(0)[-1] ^= 1
            case "truncated":
                self._slab.cell(0)[self._slab.cell_bytes // 2 :] = 0
            case "another block":
                self._slab.cell(0)[:] = 7
        if damage != "nothing written":
            await self._plane.publish(0, cells, endpoint_from(endpoint), 0, target_cells)
        return expected

    def close(self) -> None:
        self._plane.close()


class ScriptedPeer:
    """The gateway's end of one Link. Whatever the worker says is kept until a test asks for it."""

    def __init__(self, call: grpc.aio.StreamStreamCall, welcome: link_pb2.Welcome):
        self.welcome = welcome
        self.heard: list[link_pb2.WorkerMessage] = []
        self._call = call
        self._news = asyncio.Condition()

    async def send(self, **message) -> None:
        await self._call.write(link_pb2.GatewayMessage(**message))

    async def read_all(self) -> None:
        while isinstance(message := await self._call.read(), link_pb2.WorkerMessage):
            async with self._news:
                self.heard.append(message)
                self._news.notify_all()

    async def expect(self, kind: str, handoff: bytes):
        """Waits for the next message of that kind about that handoff, and removes it."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S), self._news:
                while (found := self._take(kind, handoff)) is None:
                    await self._news.wait()
                return found
        except TimeoutError:
            raise AssertionError(f"no {kind} came; there is {self.said_of(handoff)}") from None

    def _take(self, kind: str, handoff: bytes):
        for message in self.heard:
            about = getattr(message, kind)
            if message.WhichOneof("message") == kind and _id_of(about) == handoff:
                self.heard.remove(message)
                return about
        return None

    def said_of(self, handoff: bytes) -> list[str | None]:
        """The kinds of messages about a handoff that were not asked for yet."""
        kinds = [(message.WhichOneof("message"), message) for message in self.heard]
        return [kind for kind, message in kinds if _id_of(getattr(message, kind or "load")) == handoff]

    async def tokens(self, handoff: bytes, num_tokens: int) -> list[int]:
        """What the batch gave a request, until it has so many."""
        async with asyncio.timeout(ANSWER_TIMEOUT_S), self._news:
            while len(found := self.tokens_so_far(handoff)) < num_tokens:
                await self._news.wait()
        return found

    def tokens_so_far(self, handoff: bytes) -> list[int]:
        outputs = (output for message in self.heard for output in message.step.outputs)
        return [token for output in outputs if output.request_id == handoff for token in output.token_ids]

    async def barrier(self) -> None:
        """Waits until the worker has handled everything sent before: it answers in order."""
        nobody = secrets.token_bytes(16)
        await self.send(landed=link_pb2.Manifest(handoff=nobody, writer_epoch=nobody, target_epoch=nobody))
        await self.expect("failed", nobody)


def _id_of(about) -> bytes:
    return getattr(about, "handoff", b"") or getattr(about, "request_id", b"")


@asynccontextmanager
async def linked(address: str) -> AsyncIterator[ScriptedPeer]:
    async with grpc.aio.insecure_channel(address) as channel:
        call: Any = await open_link(channel, address)
        hello = link_pb2.Hello(protocol_version=PROTOCOL_VERSION, gateway_epoch=secrets.token_bytes(16))
        await call.write(link_pb2.GatewayMessage(hello=hello))
        peer = ScriptedPeer(call, (await call.read()).welcome)
        reading = asyncio.create_task(peer.read_all())
        try:
            yield peer
            await call.done_writing()
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


def run_of(handoff: bytes, prompt: Sequence[int], max_tokens: int = 8, n: int = 1) -> link_pb2.Run:
    sampling = link_pb2.EngineSampling(temperature=0, top_p=1, repetition_penalty=1)
    return link_pb2.Run(request_id=handoff, prompt_tokens=prompt, sampling=sampling, max_tokens=max_tokens, n=n)
