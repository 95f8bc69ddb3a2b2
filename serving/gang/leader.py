"""The leader's end of a gang: its followers' streams, the steps that it tells them, and whether they still follow.

Nobody serves before all members are there and have loaded. From then on one fault is everybody's: the leader ends its
process, every stream breaks, and each follower ends with it.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import grpc

from moonshard.rpc import link_pb2
from moonshard.rpc.link import PROTOCOL_VERSION
from moonshard.rpc.status import FailedPrecondition, InvalidArgument, RequestError, abort
from moonshard.serving.config.keys import ConfigError
from moonshard.serving.gang.members import GangFault, unlike
from moonshard.serving.gang.orders import Orders
from moonshard.serving.gang.tiers.orders import TierOrders
from moonshard.serving.gang.watch import LOOKS_PER_TIMEOUT, Watched

SERVICE = link_pb2.DESCRIPTOR.services_by_name["Gang"]
BEAT = link_pb2.LeaderMessage(beat=link_pb2.GangBeat()).SerializeToString()
END = link_pb2.LeaderMessage(end=link_pb2.GangEnd()).SerializeToString()
END_S = 5.0  # for followers to end when they have heard that the gang does
MAX_DIGESTS = 1024  # of steps that not all members have finished

logger = logging.getLogger(__name__)


class Follower:
    """One follower's stream."""

    def __init__(self, member: int):
        self.member = member
        self.watched = Watched(f"member {member} of the gang")
        self.ready: link_pb2.FollowerReady | None = None
        self.tiers: Sequence[link_pb2.KvTier] = ()  # below its devices' pages, as it told of them last
        self.tier_orders = TierOrders(member, self._tell_of_tiers)
        self.outbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.has_ended = asyncio.Event()

    def _tell_of_tiers(self, order: link_pb2.TierOrder) -> None:
        self.outbox.put_nowait(link_pb2.LeaderMessage(tier_order=order).SerializeToString())


class Gang:
    """Its followers and what they are told. On the event loop, but for `tell`."""

    def __init__(
        self,
        num_members: int,
        made_of: asyncio.Task[dict[str, str]],
        *,
        timeout_s: float,
        num_drawing: int | None = None,
        on_leaving: Callable[[], None] = lambda: None,
    ):
        """`made_of`: what all members must have alike, by its name in words; its error is raised by `gather`.

        `num_drawing`: as of `members.num_drawing`; None: all. `on_leaving`: a follower was told to end.
        """
        self.num_members = num_members
        self._num_drawing = num_members if num_drawing is None else num_drawing
        self._made_of = made_of
        self._on_leaving = on_leaving
        self._timeout_s = timeout_s
        self._followers: dict[int, Follower] = {}
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Condition()
        self._watching: asyncio.Task[None] | None = None
        self._own = Watched("the leader of the gang")  # that it goes on, too: this loop lives when its device hangs
        self._is_ending = False
        self._refused = ""  # who was last, and why, for whom nobody else comes
        self.orders = Orders(num_members, self._tell_order)
        self._drawn = OrderedDict[int, dict[bytes, list[str]]]()  # who drew what in a step
        self.failed: asyncio.Future[None] = self._loop.create_future()

    # ---- until it serves

    async def gather(self, timeout_s: float) -> None:
        """Until all followers are there. ConfigError for those that are not after `timeout_s`."""
        await self._made_of
        await self._until(lambda member: member in self._followers, timeout_s, "has not joined the gang")

    def welcome(self, coordinator: str) -> None:
        """All are there: they meet at jax's coordination service."""
        message = link_pb2.LeaderMessage(welcome=link_pb2.GangWelcome(coordinator=coordinator))
        self._tell_all(message.SerializeToString())

    async def wait_ready(self, timeout_s: float) -> None:
        """Until all followers have loaded; then they are watched. Raises as `gather`, and what became of one."""
        await self._until(lambda member: self._followers[member].ready is not None, timeout_s, "has not loaded")
        self._watching = asyncio.create_task(self._watch())

    def check_alike(self, own: Mapping[str, str]) -> None:
        """ConfigError where a follower that has loaded has not what the leader has, `own`."""
        for follower in self.followers:
            loaded = {} if follower.ready is None else follower.ready.loaded_as
            if difference := unlike(own, loaded):
                raise ConfigError([f"{follower.watched.name} has loaded {difference}"])

    async def _until(self, is_there: Callable[[int], bool], timeout_s: float, what: str) -> None:
        def missing() -> list[int]:
            return [member for member in range(1, self.num_members) if not is_there(member)]

        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.failed.done() or not missing())
        except TimeoutError:
            members = ", ".join(map(str, missing()))
            told = f"member {members} {what} in {timeout_s:g} s{self._refused}"
            raise ConfigError([f"worker.gang_join_timeout_s: {told}"]) from None
        if self.failed.done():
            self.failed.result()

    @property
    def followers(self) -> list[Follower]:
        """Those that are there, in their order."""
        return [self._followers[member] for member in sorted(self._followers)]

    @property
    def ready(self) -> list[link_pb2.FollowerReady]:
        """What the followers that have loaded say of themselves, in their order."""
        return [follower.ready for follower in self.followers if follower.ready is not None]

    # ---- while it serves

    def tell(self, message: link_pb2.LeaderMessage) -> None:
        """Tells all followers a step, or its masks; in the order of the calls, from any thread."""
        is_whole = not message.step.is_masked  # else nobody can finish it yet: it may wait for the leader
        self._loop.call_soon_threadsafe(self._tell_step, message.SerializeToString(), is_whole)

    def done(self, number: int, drawn: bytes) -> None:
        """The leader itself has finished a step; the digest of what it drew, empty for nothing. From any thread."""
        self._loop.call_soon_threadsafe(self._note_own, number, drawn)

    def _note_own(self, number: int, drawn: bytes) -> None:
        self._own.done()
        if drawn:
            self._compare(number, drawn, "the leader")

    async def end(self) -> None:
        """In order: followers end with it, and nobody calls that a fault."""
        self._is_ending = True
        self._tell_all(END)
        for follower in self._followers.values():
            follower.outbox.put_nowait(None)
        ended = [asyncio.create_task(follower.has_ended.wait()) for follower in self._followers.values()]
        if ended:
            await asyncio.wait(ended, timeout=END_S)

    async def _watch(self) -> None:
        while not self._is_ending:
            self._tell_all(BEAT)
            await asyncio.sleep(self._timeout_s / LOOKS_PER_TIMEOUT)
            self._own.heard()
            for watched in (self._own, *(follower.watched for follower in self._followers.values())):
                if (fault := watched.look(self._timeout_s)) is not None:
                    self._fail(GangFault(fault))
            if (fault := self.orders.look(self._timeout_s)) is not None:
                self._fail(GangFault(fault))

    def _tell_order(self, order: link_pb2.GangOrder) -> None:
        self._tell_all(link_pb2.LeaderMessage(order=order).SerializeToString())

    def _tell_step(self, encoded: bytes, is_whole: bool) -> None:
        self._own.num_told += is_whole
        for follower in self._followers.values():
            follower.watched.num_told += is_whole
        self._tell_all(encoded)

    def _tell_all(self, encoded: bytes) -> None:
        for follower in self._followers.values():
            follower.outbox.put_nowait(encoded)

    def _compare(self, number: int, digest: bytes, who: str) -> None:
        """Every member that draws draws all tokens: from the same logits the same."""
        said = self._drawn.setdefault(number, {})
        said.setdefault(digest, []).append(who)
        if len(said) > 1:
            groups = "; ".join(", ".join(names) for names in said.values())
            self._fail(GangFault(f"members drew different tokens in step {number}: {groups}"))
        elif len(said[digest]) == self._num_drawing:
            del self._drawn[number]
        elif len(self._drawn) > MAX_DIGESTS:
            self._drawn.popitem(last=False)

    def _fail(self, error: Exception) -> None:
        if not (self._is_ending or self.failed.done()):
            self.failed.set_exception(error)

    # ---- streams

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the service with a `Follow` that writes bytes: a message is encoded once for all."""
        follow = grpc.stream_stream_rpc_method_handler(
            self.Follow, request_deserializer=link_pb2.FollowerMessage.FromString, response_serializer=None
        )
        handler = grpc.method_handlers_generic_handler(SERVICE.full_name, {"Follow": follow})
        server.add_generic_rpc_handlers((handler,))

    async def Follow(
        self, request_iterator: AsyncIterator[link_pb2.FollowerMessage], context: grpc.aio.ServicerContext
    ) -> None:
        try:
            own = await asyncio.shield(self._made_of)
            follower = self._let_in(await anext(request_iterator, None), own)
        except RequestError as error:
            logger.warning("a follower at %s is refused: %s", context.peer(), error.message)
            self._refused = f"; one at {context.peer()} was refused: {error.message}"
            await abort(context, error)
        writing = asyncio.create_task(_write_all(context, follower))
        reading = asyncio.create_task(self._read_all(request_iterator, follower))
        try:
            await self._notify()
            await asyncio.wait({writing, reading}, return_when=asyncio.FIRST_COMPLETED)
            if self._is_ending:
                await asyncio.wait({reading})  # until the follower has closed what it has
        finally:
            for task in (writing, reading):
                task.cancel()
            await asyncio.gather(writing, reading, return_exceptions=True)
            follower.has_ended.set()
            self._fail(GangFault(f"{follower.watched.name} went away"))
            await self._notify()

    def _let_in(self, message: link_pb2.FollowerMessage | None, own: Mapping[str, str]) -> Follower:
        if message is None or message.WhichOneof("message") != "hello":
            raise InvalidArgument("a follower begins with hello", field="hello")
        hello = message.hello
        if hello.protocol_version != PROTOCOL_VERSION:
            raise FailedPrecondition(
                f"protocol_version is {hello.protocol_version}; the leader speaks {PROTOCOL_VERSION}",
                field="protocol_version",
            )
        if not 1 <= hello.member < self.num_members:
            raise InvalidArgument(f"member {hello.member} is none of 1 to {self.num_members - 1}", field="member")
        if hello.member in self._followers:
            raise FailedPrecondition(f"there is a member {hello.member} already", field="member")
        if difference := unlike(own, hello.made_of):
            raise FailedPrecondition(f"member {hello.member} has {difference}", field="made_of")
        follower = self._followers[hello.member] = Follower(hello.member)
        return follower

    async def _read_all(self, messages: AsyncIterator[link_pb2.FollowerMessage], follower: Follower) -> None:
        async for message in messages:
            follower.watched.heard()
            match message.WhichOneof("message"):
                case "ready":
                    follower.ready = message.ready
                    await self._notify()
                case "done":
                    follower.watched.done()
                    if message.done.drawn:
                        self._compare(message.done.number, message.done.drawn, follower.watched.name)
                case "answer":
                    self._take(self.orders.answered, follower.member, message.answer)
                case "tier_answer":
                    self._take(follower.tier_orders.answered, message.tier_answer)
                case "beat":
                    follower.tiers = message.beat.tiers
                case "leaving":
                    self._on_leaving()
                case "fault":
                    self._fail(_fault_of(follower, message.fault))
                    return
                case _:
                    pass

    def _take[*Ts](self, answered: Callable[[*Ts], None], *arguments: *Ts) -> None:
        try:
            answered(*arguments)
        except GangFault as fault:
            self._fail(fault)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def _write_all(context: grpc.aio.ServicerContext, follower: Follower) -> None:
    while (encoded := await follower.outbox.get()) is not None:
        await context.write(encoded)


def _fault_of(follower: Follower, fault: link_pb2.FollowerFault) -> Exception:
    message = f"{follower.watched.name}: {fault.message}"
    return ConfigError([message]) if fault.is_startup else GangFault(message)
