"""Each end of a gang's stream by itself: a leader on loopback, and followers that say what a test has them say."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import grpc

from moonshard.rpc import link_pb2
from moonshard.rpc.link import PROTOCOL_VERSION
from moonshard.rpc.server.door import open_stream
from moonshard.rpc.server.server import build_server
from moonshard.serving.gang.follower import METHOD
from moonshard.serving.gang.leader import SERVICE, Gang
from tests.dialling import own_key, port_of

MADE_OF = {"role": "both", "version of the code": "1", "kv.num_blocks": "2", "checkpoint": "3"}
HANG_S = 30.0


@asynccontextmanager
async def leading(
    num_members: int,
    *,
    timeout_s: float = HANG_S,
    num_drawing: int | None = None,
    on_leaving: Callable[[], None] = lambda: None,
) -> AsyncIterator[tuple[Gang, str]]:
    """A gang without its model, and where it listens."""

    async def made_of() -> dict[str, str]:
        return MADE_OF

    own = asyncio.create_task(made_of())
    gang = Gang(num_members, own, timeout_s=timeout_s, num_drawing=num_drawing, on_leaving=on_leaving)
    server = build_server(
        host="127.0.0.1",
        port=0,
        add_servicers=[gang.add_to],
        service_names=[SERVICE.full_name],
        key=own_key().proofs,
    )
    async with asyncio.timeout(HANG_S):
        await server.start()
        try:
            yield gang, f"127.0.0.1:{server.port}"
        finally:
            await server.stop(0)
            if gang.failed.done():
                gang.failed.exception()  # seen


class ScriptedFollower:
    """One stream to a leader."""

    def __init__(self, call: grpc.aio.StreamStreamCall):
        self._call = call

    async def say(self, **message: object) -> None:
        await self._call.write(link_pb2.FollowerMessage(**message))  # pyright: ignore[reportArgumentType]

    async def hello(
        self, member: int, made_of: Mapping[str, str] = MADE_OF, protocol_version: int = PROTOCOL_VERSION
    ) -> None:
        hello = link_pb2.FollowerHello(protocol_version=protocol_version, member=member, made_of=made_of)
        await self.say(hello=hello)

    async def ready(self, loaded_as: Mapping[str, str] | None = None) -> None:
        await self.say(ready=link_pb2.FollowerReady(loaded_as=loaded_as))

    async def hears(self, what: str) -> link_pb2.LeaderMessage:
        """The next message of that kind."""
        while True:
            message = await self._call.read()
            assert isinstance(message, link_pb2.LeaderMessage), await self.ending()
            if message.WhichOneof("message") == what:
                return message

    async def ending(self) -> tuple[grpc.StatusCode, str]:
        """How the leader ends the stream."""
        return await self._call.code(), await self._call.details() or ""

    def break_off(self) -> None:
        self._call.cancel()


@asynccontextmanager
async def following(leader: str, member: int | None = None) -> AsyncIterator[ScriptedFollower]:
    """A stream that was let in; with `member` it has said hello."""
    async with grpc.aio.insecure_channel(leader) as channel:
        call = await open_stream(channel, METHOD, own_key().proofs, port_of(leader), link_pb2.LeaderMessage.FromString)
        follower = ScriptedFollower(call)
        if member is not None:
            await follower.hello(member)
        yield follower
