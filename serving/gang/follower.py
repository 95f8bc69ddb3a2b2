"""A follower of a gang as a process: it calls its leader, loads its part of the model, and runs the steps it is told.

It has no port but for its part of the KV, no scheduler and no request. It ends with its leader's stream, in whatever
way that ends; a signal does not end it but the whole gang, which drains first.
"""

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import grpc

from moonshard.rpc import link_pb2
from moonshard.rpc.link import CHANNEL_OPTIONS, PROTOCOL_VERSION
from moonshard.rpc.server.door import ServerUnproved, open_stream
from moonshard.rpc.server.server import PortInUse, build_server
from moonshard.rpc.server.trouble import reason
from moonshard.serving.config.cluster_key import cluster_key
from moonshard.serving.config.keys import Config, ConfigError, WorkerRole, port_key, port_of
from moonshard.serving.config.tls import link_credentials, server_tls
from moonshard.serving.deploy.device_process import begin_device_process
from moonshard.serving.deploy.heap import importing, keep_for_life
from moonshard.serving.deploy.life import FAILED_EXIT_CODE, SIGNALS
from moonshard.serving.deploy.startup import ProcessStart, startup_message, tell_start
from moonshard.serving.deploy.status_pipe import Status
from moonshard.serving.gang.members import GangFault, Member, end_at_once, made_of, meet
from moonshard.serving.gang.watch import LOOKS_PER_TIMEOUT, Watched
from moonshard.serving.observe.rows.recorder import recording
from moonshard.serving.observe.rows.schema import STARTS
from moonshard.serving.transfer.transports import KvTransports, openness

if TYPE_CHECKING:  # what needs jax is imported once all members are there
    from moonshard.serving.engine.loading.model import LoadedModel
    from moonshard.serving.gang.following import Steps
    from moonshard.serving.transfer.plane import KvPlane

METHOD = f"/{link_pb2.DESCRIPTOR.services_by_name['Gang'].full_name}/Follow"
MAX_LOGGED = 20  # reasons
RETRY_S = 0.1  # while the leader is not there
OTHERS_MISSING = "others than this member were missing"
CLOSE_S = 4.0  # for tiers, at the end: less than the leader waits for this process
logger = logging.getLogger(__name__)

Stream = grpc.aio.StreamStreamCall


async def run_follower(
    config: Config, role: WorkerRole, member: Member, *, status: Status, start: ProcessStart
) -> NoReturn:
    """The process ends with the gang. A start-up error is told to the leader, and raised."""
    begin_device_process()
    _on_signals(functools.partial(end_at_once, 0))
    own = await asyncio.to_thread(made_of, config, role)
    status("progress", {"message": f"joining the gang of {member.leader}"})
    call, coordinator = await _meet_leader(config, member, own)
    following = Following(config, role, member, call, status, start)
    _on_signals(following.leave)
    try:
        await following.run(coordinator)
    except Exception as error:
        await _tell_fault(call, error)
        if startup_message(error) is None:
            logger.error("this member of the gang ends", exc_info=None if isinstance(error, GangFault) else error)
            end_at_once(FAILED_EXIT_CODE, str(error))
        raise


def _on_signals(act: Callable[[], object]) -> None:
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, act)


async def _meet_leader(config: Config, member: Member, own: dict[str, str]) -> tuple[Stream, str]:
    """The stream, and where all members meet, once all have joined.

    ConfigError where that takes too long, or the leader refuses this one.
    """
    timeout_s, trouble = config.worker.gang_join_timeout_s, Trouble(member)
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                channel, call = await _join(config, member, own, trouble)
                trouble.last = OTHERS_MISSING
                try:
                    return call, (await _read(call)).welcome.coordinator
                except GangFault as fault:  # one of the last gang, which ends
                    trouble.note(str(fault))
                    await channel.close()
                    await asyncio.sleep(RETRY_S)
    except TimeoutError:
        told = f"the gang of {member.leader} was not complete in {timeout_s:g} s; {trouble.last}"
        raise ConfigError([f"worker.gang_join_timeout_s: {told}"]) from None


@dataclass(slots=True)
class Trouble:
    """What keeps a member from joining, each reason logged once."""

    member: Member
    last: str = OTHERS_MISSING
    logged: set[str] = field(default_factory=set[str])

    def note(self, what: str) -> None:
        self.last = f"{self.member.leader} was not joined: {what}"
        if what not in self.logged and len(self.logged) < MAX_LOGGED:
            logger.warning("%s; it is asked again", self.last)
        self.logged.add(what)


async def _join(
    config: Config, member: Member, own: dict[str, str], trouble: Trouble
) -> tuple[grpc.aio.Channel, Stream]:
    """The stream to the leader, once that is there."""
    assert member.leader is not None  # of whoever follows
    key, credentials = cluster_key(config, os.environ).proofs, link_credentials(config)
    port = 0 if credentials else int(member.leader.rpartition(":")[2])
    hello = link_pb2.FollowerHello(protocol_version=PROTOCOL_VERSION, member=member.index, made_of=own)
    while True:
        channel = _channel(member.leader, credentials)
        try:
            call = await open_stream(channel, METHOD, key, port, link_pb2.LeaderMessage.FromString)
            await call.write(link_pb2.FollowerMessage(hello=hello))
            return channel, call
        except ServerUnproved as error:
            raise ConfigError([f"cluster.key_file: whoever answers at {member.leader} has another key"]) from error
        except (grpc.aio.AioRpcError, TimeoutError, asyncio.InvalidStateError) as error:
            trouble.note(reason(error, has_tls=credentials is not None))
            await channel.close()
            await asyncio.sleep(RETRY_S)


def _channel(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)


async def _read(call: Stream) -> link_pb2.LeaderMessage:
    """ConfigError where the leader refuses this member, GangFault where its stream ends in any other way."""
    message = None
    with contextlib.suppress(grpc.aio.AioRpcError):  # its status tells
        message = await call.read()
    if isinstance(message, link_pb2.LeaderMessage):
        return message
    code, details = await call.code(), await call.details()
    if code is grpc.StatusCode.FAILED_PRECONDITION or code is grpc.StatusCode.INVALID_ARGUMENT:
        raise ConfigError([f"the leader refuses this member: {details}"])
    raise GangFault(details or "the leader went away")


async def _tell_fault(call: Stream, error: BaseException) -> None:
    startup = startup_message(error)
    fault = link_pb2.FollowerFault(message=startup or repr(error), is_startup=startup is not None)
    try:
        async with asyncio.timeout(1.0):
            await call.write(link_pb2.FollowerMessage(fault=fault))
            await call.done_writing()
    except (TimeoutError, grpc.RpcError, asyncio.InvalidStateError):
        return  # the leader is gone


@dataclass(slots=True)
class Following:
    """A member that has joined. It ends with the gang."""

    config: Config
    role: WorkerRole
    member: Member
    call: Stream
    status: Status
    start: ProcessStart
    outbox: asyncio.Queue[link_pb2.FollowerMessage] = field(default_factory=asyncio.Queue)

    def leave(self) -> None:
        """The leader drains, and the gang ends."""
        self.outbox.put_nowait(link_pb2.FollowerMessage(leaving=link_pb2.FollowerLeaving()))

    async def run(self, coordinator: str) -> NoReturn:
        transports = KvTransports(self.config, cluster_key(self.config, os.environ).proofs)
        async with _receiving(self.config, self.role, transports) as port:
            await self._run(coordinator, lambda model: transports.open_plane(model, port), port)
        raise AssertionError("a gang that ended without a word")

    async def _run(self, coordinator: str, open_plane: "Callable[[LoadedModel], KvPlane]", port: int) -> NoReturn:
        leader = Watched("the leader of the gang")
        outbox = self.outbox
        writing = asyncio.create_task(_write_all(self.call, outbox))
        told: asyncio.Queue[link_pb2.LeaderMessage] = asyncio.Queue()
        begun = asyncio.Event()
        reading = asyncio.create_task(_read_all(self.call, leader, begun, told))
        loading = asyncio.create_task(self._load(coordinator, open_plane))
        await asyncio.wait({loading, reading}, return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            reading.result()
            end_at_once(0)
        serve = loading.result()
        keep_for_life()
        async with recording(self.config.trace, STARTS) as recorder:
            process = f"{self.member.leader} member {self.member.index}"
            tell_start(self.start.timings, self.status, recorder, process=process, role=self.role)
        outbox.put_nowait(link_pb2.FollowerMessage(ready=serve.ready))  # it is watched from now on
        self.status("ready", openness(self.config, self.role, port))
        timeout_s = self.config.worker.gang_timeout_s
        watching = asyncio.create_task(_watch(leader, begun, lambda: outbox.put_nowait(serve.beat()), timeout_s))
        running = asyncio.create_task(serve.run(told, outbox))
        done, _ = await asyncio.wait({reading, watching, running, writing}, return_when=asyncio.FIRST_COMPLETED)
        for task in (reading,) if reading in done else done:  # with its stream all else ends
            task.result()
        await asyncio.wait({asyncio.create_task(asyncio.to_thread(serve.close))}, timeout=CLOSE_S)
        end_at_once(0)

    async def _load(self, coordinator: str, open_plane: "Callable[[LoadedModel], KvPlane]") -> "Steps":
        loop = asyncio.get_running_loop()

        def progress(message: str) -> None:
            loop.call_soon_threadsafe(self.status, "progress", {"message": message})

        def on_thread() -> "Steps":
            with self.start.timings.phase("jax"), importing():
                from moonshard.serving.gang.following import load
            worker = self.config.worker
            meet(coordinator, self.member, worker.host, timeout_s=worker.gang_join_timeout_s)
            return load(self.config, self.role, open_plane, progress, self.start)

        return await asyncio.to_thread(on_thread)


@contextlib.asynccontextmanager
async def _receiving(config: Config, role: WorkerRole, transports: KvTransports) -> AsyncIterator[int]:
    """The port at which peers write KV within the block; 0: at one of the transport's own, or never.

    ConfigError where it cannot be had.
    """
    if role == "both" or not transports.needs_server:
        yield 0
        return
    try:
        server = build_server(
            host=config.worker.host,
            port=port_of(config, role),
            add_servicers=[transports.add_to],
            service_names=[],
            tls=server_tls(config),
            key=cluster_key(config, os.environ).proofs,
        )
    except PortInUse as error:
        raise ConfigError([f"{port_key(role)}: {error}"]) from error
    except OSError as error:
        raise ConfigError([f"worker.host: cannot listen at {config.worker.host}: {error.strerror}"]) from error
    await server.start()
    try:
        yield server.port
    finally:
        await server.stop(0)


async def _write_all(call: Stream, outbox: asyncio.Queue[link_pb2.FollowerMessage]) -> None:
    while True:
        await call.write(await outbox.get())


async def _read_all(
    call: Stream, leader: Watched, begun: asyncio.Event, told: asyncio.Queue[link_pb2.LeaderMessage]
) -> None:
    """Until the gang ends in order."""
    while True:
        message = await _read(call)
        leader.heard()
        match message.WhichOneof("message"):
            case "beat":
                begun.set()
            case "end":
                return
            case _:
                told.put_nowait(message)


async def _watch(leader: Watched, begun: asyncio.Event, beat: Callable[[], None], timeout_s: float) -> None:
    """Beats from now on; and from the leader's first beat on, which comes once all have loaded, expects its beats."""
    while True:
        beat()
        await asyncio.sleep(timeout_s / LOOKS_PER_TIMEOUT)
        fault = leader.look(timeout_s) if begun.is_set() else None
        if fault is not None:
            raise GangFault(fault)
