"""A worker without a model: real gRPC, every role, and a script to misbehave by.

Each request, and each leg of a handoff, runs in a task of its own, one step per token.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

import grpc

from moonshard.rpc import link_pb2, link_pb2_grpc
from moonshard.rpc.link import PROTOCOL_VERSION
from moonshard.rpc.server.door import Door
from tests.dialling import own_key
from tests.serving.gateway.fake_script import (
    BLOCK_SIZE,
    MAX_CONTEXT_TOKENS,
    NUM_BLOCKS,
    VOCAB_SIZE,
    Generation,
    LegFailed,
    Script,
    expected_tokens,
    overloaded,
)
from tests.serving.gateway.pipeline.fake_legs import DecodeLeg, PrefillLeg

__all__ = [
    "BLOCK_SIZE",
    "MAX_CONTEXT_TOKENS",
    "NUM_BLOCKS",
    "VOCAB_SIZE",
    "FakeWorker",
    "Script",
    "expected_tokens",
    "overloaded",
    "serving",
]

HEARTBEAT_S = 0.25  # as a real worker's


class FakeWorker(link_pb2_grpc.WorkerServicer):
    """`role` is both, prefill or decode. What it heard is kept in lists; `script` says what it answers."""

    def __init__(self, *, epoch: bytes = b"e" * 16, fingerprint: str = "f" * 64, role: str = "both") -> None:
        self.script = Script()
        self.welcome = link_pb2.Welcome(
            protocol_version=PROTOCOL_VERSION,
            epoch=epoch,
            fingerprint=fingerprint,
            role=role,
            dtype="float32",
            vocab_size=VOCAB_SIZE,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            block_size=BLOCK_SIZE,
            num_partitions=1,
            num_blocks=NUM_BLOCKS,
            max_slots=8,
            load_s=1.5,
            compile_s=2.5,
            kernels="avx2",
            endpoint=link_pb2.KvEndpoint(transport="fake", session="127.0.0.1:1") if role == "decode" else None,
        )
        self.runs: list[link_pb2.Run] = []  # with or without a target
        self.reserves: list[link_pb2.Reserve] = []
        self.starts: list[link_pb2.Start] = []
        self.drained: list[link_pb2.Drained] = []
        self.refused: list[link_pb2.Refused] = []
        self.cancelled: list[bytes] = []
        self.finished: list[bytes] = []
        self.leases: set[bytes] = set()  # handoffs that may still be written into
        self.run_seen = asyncio.Event()
        self.cancel_seen = asyncio.Event()
        self.num_links = 0
        self.load = link_pb2.WorkerLoad(free_blocks=[NUM_BLOCKS - 16], num_compilations=3)
        self._steps = 0
        self._running: dict[bytes, asyncio.Task[None]] = {}
        self._prefill_legs: dict[bytes, PrefillLeg] = {}
        self._decode_legs: dict[bytes, DecodeLeg] = {}
        self._outbox: asyncio.Queue[link_pb2.WorkerMessage] = asyncio.Queue()
        self._drop = asyncio.Event()
        self._may_speak = asyncio.Event()
        self._may_speak.set()
        self._is_dead = False

    async def Link(
        self, request_iterator: AsyncIterator[link_pb2.GatewayMessage], context: grpc.aio.ServicerContext
    ) -> None:
        """The stream: Welcome, then whatever the runs produce."""
        if self._is_dead:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker is dead")
        self._outbox = asyncio.Queue()
        self._drop = asyncio.Event()
        self.num_links += 1
        reading = asyncio.create_task(self._read(request_iterator))
        dropped = asyncio.create_task(self._drop.wait())
        others = [asyncio.create_task(self._write(self._outbox, context)), asyncio.create_task(self._beat())]
        try:
            await asyncio.wait((reading, dropped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            tasks = [reading, dropped, *others, *self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def say(self, message: link_pb2.WorkerMessage) -> None:
        """Sends a message on the open link."""
        await self._outbox.put(message)

    async def seen(self, num_runs: int) -> None:
        """Waits until that many requests have arrived."""
        while len(self.runs) < num_runs:
            self.run_seen.clear()
            await self.run_seen.wait()

    @property
    def num_running(self) -> int:
        """The requests and legs that have not ended."""
        return len(self._running)

    def drop_link(self) -> None:
        """Breaks the stream; the next one is welcome."""
        self._drop.set()

    def die(self) -> None:
        """Breaks the stream, and every further one until `revive`."""
        self._is_dead = True
        self._drop.set()

    def revive(self, *, epoch: bytes) -> None:
        """Comes back as another process at the same address."""
        self.welcome.epoch = epoch
        self.leases.clear()
        self._is_dead = False

    def fall_silent(self) -> None:
        """Sends nothing any more, though every stream stays up; messages wait for `speak`."""
        self._may_speak.clear()

    def speak(self) -> None:
        self._may_speak.set()

    def send_load(self, *, draining: bool) -> None:
        """Sends its load, as a heartbeat would."""
        self.load.draining = draining
        self._send(link_pb2.WorkerMessage(load=self.load))

    def _send(self, message: link_pb2.WorkerMessage) -> None:
        self._outbox.put_nowait(message)

    async def _read(self, requests: AsyncIterator[link_pb2.GatewayMessage]) -> None:
        async for message in requests:
            match message.WhichOneof("message"):
                case "hello":
                    self._send(link_pb2.WorkerMessage(welcome=self.welcome))
                    self._send(link_pb2.WorkerMessage(load=self.load))
                case "run":
                    self._hear_run(message.run)
                case "reserve":
                    self._hear_reserve(message.reserve)
                case "landed" if (leg := self._decode_legs.get(message.landed.handoff)) is not None:
                    leg.heard.put_nowait(message.landed)
                case "start":
                    self.starts.append(message.start)
                    if (leg := self._decode_legs.get(message.start.handoff)) is not None:
                        leg.heard.put_nowait(message.start)
                case "credits" if (leg := self._prefill_legs.get(message.credits.handoff)) is not None:
                    leg.credit(message.credits.grants)
                case "cancel":
                    self._hear_cancel(message.cancel)
                case "drained":
                    self.drained.append(message.drained)
                    self.leases.discard(message.drained.handoff)
                case "refused":
                    self.refused.append(message.refused)

    def _hear_run(self, run: link_pb2.Run) -> None:
        self.runs.append(run)
        self.run_seen.set()
        self._begin(run.request_id, lambda: self._prefill(run) if run.HasField("target") else self._generate(run))

    def _hear_reserve(self, reserve: link_pb2.Reserve) -> None:
        self.reserves.append(reserve)
        leg = DecodeLeg(reserve, self.welcome.epoch, self.script, self._send)
        self._decode_legs[reserve.run.request_id] = leg
        self._begin(reserve.run.request_id, lambda: self._decode(leg))

    def _hear_cancel(self, cancel: link_pb2.Cancel) -> None:
        """A prefill leg that is given up, or unknown, has no write under way."""
        self.cancelled.append(cancel.request_id)
        self.cancel_seen.set()
        if (task := self._running.get(cancel.request_id)) is not None:
            task.cancel()
        if self.welcome.role == "prefill":
            drained = link_pb2.Drained(
                handoff=cancel.request_id, writer_epoch=self.welcome.epoch, target_epoch=cancel.target_epoch
            )
            self._send(link_pb2.WorkerMessage(drained=drained))

    def _begin(self, request_id: bytes, course: Callable[[], Coroutine[None, None, None]]) -> None:
        task = asyncio.create_task(self._course(request_id, course))
        self._running[request_id] = task
        task.add_done_callback(lambda task: self._forget(request_id, task))

    def _forget(self, request_id: bytes, task: asyncio.Task[None]) -> None:
        if self._running.get(request_id) is not task:
            return  # the request came again
        del self._running[request_id]
        self._prefill_legs.pop(request_id, None)
        self._decode_legs.pop(request_id, None)

    async def _course(self, request_id: bytes, course: Callable[[], Coroutine[None, None, None]]) -> None:
        try:
            await course()
            self.finished.append(request_id)
        except LegFailed as error:
            failed = link_pb2.Failed(request_id=request_id)
            failed.MergeFrom(error.failed)
            self._send(link_pb2.WorkerMessage(failed=failed))

    async def _prefill(self, run: link_pb2.Run) -> None:
        if self.script.failure is not None:
            raise LegFailed(self.script.failure)
        leg = PrefillLeg(run, self.script, self._send)
        self._prefill_legs[run.request_id] = leg
        await self.script.may_step.wait()
        self._count_step(run, num_decoded=0)
        await leg.play()

    async def _decode(self, leg: DecodeLeg) -> None:
        self.leases.add(leg.reserve.run.request_id)
        try:
            generation = await leg.play()
        except LegFailed:
            if not leg.missing:  # nothing was reserved
                self.leases.discard(leg.reserve.run.request_id)
            raise
        self.leases.discard(leg.reserve.run.request_id)
        await self._go_on(leg.reserve.run, generation)

    async def _generate(self, run: link_pb2.Run) -> None:
        if self.script.failure is not None:
            raise LegFailed(self.script.failure)
        await self._go_on(run, Generation(run, self.script))

    async def _go_on(self, run: link_pb2.Run, generation: Generation) -> None:
        step = 0
        while not generation.is_over:
            await self.script.may_step.wait()
            if step == self.script.max_tokens_sent:
                self.script.may_step.clear()
                continue
            await self.script.points.at(f"step {step}")
            if self.script.pace_s:
                await asyncio.sleep(self.script.pace_s)
            if step == self.script.fail_after_tokens:
                raise LegFailed(link_pb2.Failed(code=13, message="the device failed"))
            outputs = generation.step()
            self._count_step(run, num_decoded=len(outputs), is_first=step == 0)
            message = link_pb2.StepOutput(step=self._steps, outputs=outputs, load=self.load)
            self._send(link_pb2.WorkerMessage(step=message))
            step += 1
            await asyncio.sleep(0)

    def _count_step(self, run: link_pb2.Run, *, num_decoded: int, is_first: bool = True) -> None:
        self._steps += 1
        load, is_landed = self.load, run.request_id in self._decode_legs
        load.num_running = len(self._running)
        if num_decoded:
            load.num_decode_steps += 1
            load.decode_tokens += num_decoded
        if is_first and not is_landed:
            load.num_prefill_steps += 1
            load.prefill_tokens += len(run.prompt_tokens)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._send(link_pb2.WorkerMessage(load=self.load))

    async def _write(self, outbox: asyncio.Queue[link_pb2.WorkerMessage], context: grpc.aio.ServicerContext) -> None:
        while True:
            message = await outbox.get()
            await self._may_speak.wait()
            await context.write(message)


@asynccontextmanager
async def serving(
    worker: FakeWorker, port: int = 0, *, credentials: grpc.ServerCredentials | None = None
) -> AsyncIterator[int]:
    """Serves the worker on a loopback port, which is returned."""
    door = Door(own_key().proofs, lambda: port, has_tls=credentials is not None)
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),), interceptors=(door,))
    link_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    if credentials is None:
        port = server.add_insecure_port(f"127.0.0.1:{port}")
    else:
        port = server.add_secure_port(f"127.0.0.1:{port}", credentials)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)
