"""A worker without a model: real gRPC, tokens by arithmetic, and a script to misbehave by.

The next token is a function of the choice, its last token and its position, so that a test can say beforehand what a
stream must hold. Each request runs in a task of its own, one step per token.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from moonshard.rpc import inference_pb2, link_pb2, link_pb2_grpc
from moonshard.rpc.link import PROTOCOL_VERSION

VOCAB_SIZE = 2048
MAX_CONTEXT_TOKENS = 2_000
BLOCK_SIZE = 16
NUM_BLOCKS = 64
PHASES = link_pb2.WorkerPhases(queue_ms=0.01, prefill_ms=0.02)
LAST_PHASES = link_pb2.WorkerPhases(queue_ms=0.01, prefill_ms=0.02, decode_ms=0.5)


def arithmetic(choice: int, last_token: int, position: int) -> int:
    return (last_token * 7 + position * 3 + choice + 1) % 256


def expected_tokens(prompt: Iterable[int], num_tokens: int, choice: int = 0) -> list[int]:
    prompt = list(prompt)
    tokens = prompt[:]
    for _ in range(num_tokens):
        tokens.append(arithmetic(choice, tokens[-1], len(tokens)))
    return tokens[len(prompt) :]


@dataclass
class Script:
    """How the worker behaves; a test may change it at any time."""

    next_token: Callable[[int, int, int], int] = arithmetic
    failure: link_pb2.Failed | None = None  # instead of a first token
    fail_after_tokens: int | None = None
    cached_tokens: int = 0
    may_step: asyncio.Event = field(default_factory=asyncio.Event)  # cleared: no step of any request
    max_tokens_sent: int | None = None  # then silence, until may_step is set anew or the request is cancelled

    def __post_init__(self) -> None:
        self.may_step.set()


class FakeWorker(link_pb2_grpc.WorkerServicer):
    def __init__(self, *, epoch: bytes = b"e" * 16, fingerprint: str = "f" * 64) -> None:
        self.script = Script()
        self.welcome = link_pb2.Welcome(
            protocol_version=PROTOCOL_VERSION,
            epoch=epoch,
            fingerprint=fingerprint,
            role="both",
            dtype="float32",
            vocab_size=VOCAB_SIZE,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            block_size=BLOCK_SIZE,
            num_partitions=1,
            num_blocks=NUM_BLOCKS,
            max_slots=8,
            load_s=1.5,
            compile_s=2.5,
        )
        self.runs: list[link_pb2.Run] = []
        self.cancelled: list[bytes] = []
        self.finished: list[bytes] = []
        self.run_seen = asyncio.Event()
        self.cancel_seen = asyncio.Event()
        self.num_links = 0
        self.load = link_pb2.WorkerLoad(free_blocks=[NUM_BLOCKS - 16], num_compilations=3)
        self._steps = 0
        self._running: dict[bytes, asyncio.Task[None]] = {}
        self._send: Callable[[link_pb2.WorkerMessage], None] = lambda _message: None
        self._drop = asyncio.Event()

    async def Link(
        self, request_iterator: AsyncIterator[link_pb2.GatewayMessage], context: grpc.aio.ServicerContext
    ) -> None:
        """The stream: Welcome, then whatever the runs produce."""
        outbox: asyncio.Queue[link_pb2.WorkerMessage] = asyncio.Queue()
        self._send = outbox.put_nowait
        self._drop = asyncio.Event()
        self.num_links += 1
        reading = asyncio.create_task(self._read(request_iterator))
        writing = asyncio.create_task(self._write(outbox, context))
        dropped = asyncio.create_task(self._drop.wait())
        try:
            await asyncio.wait((reading, dropped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            tasks = [reading, writing, dropped, *self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def seen(self, num_runs: int) -> None:
        """Until that many requests have arrived."""
        while len(self.runs) < num_runs:
            self.run_seen.clear()
            await self.run_seen.wait()

    def drop_link(self) -> None:
        self._drop.set()

    def send_load(self, *, draining: bool) -> None:
        """As a heartbeat would."""
        self.load.draining = draining
        self._send(link_pb2.WorkerMessage(load=self.load))

    async def _read(self, requests: AsyncIterator[link_pb2.GatewayMessage]) -> None:
        async for message in requests:
            match message.WhichOneof("message"):
                case "hello":
                    self._send(link_pb2.WorkerMessage(welcome=self.welcome))
                    self._send(link_pb2.WorkerMessage(load=self.load))
                case "run":
                    self.runs.append(message.run)
                    self.run_seen.set()
                    self._running[message.run.request_id] = asyncio.create_task(self._generate(message.run))
                case "cancel":
                    self.cancelled.append(message.cancel.request_id)
                    self.cancel_seen.set()
                    self._running[message.cancel.request_id].cancel()

    @staticmethod
    async def _write(outbox: asyncio.Queue[link_pb2.WorkerMessage], context: grpc.aio.ServicerContext) -> None:
        while True:
            await context.write(await outbox.get())

    async def _generate(self, run: link_pb2.Run) -> None:
        if self.script.failure is not None:
            failed = link_pb2.Failed(request_id=run.request_id)
            failed.MergeFrom(self.script.failure)
            self._send(link_pb2.WorkerMessage(failed=failed))
            return
        states = {choice: list(run.prompt_tokens) for choice in range(run.n)}
        step = 0
        while states:
            await self.script.may_step.wait()
            if step == self.script.max_tokens_sent:
                self.script.may_step.clear()
                continue
            if step == self.script.fail_after_tokens:
                failed = link_pb2.Failed(request_id=run.request_id, code=13, message="the device failed")
                self._send(link_pb2.WorkerMessage(failed=failed))
                return
            self._send_step([self._advance(run, choice, states, step) for choice in list(states)], run, step)
            step += 1
            await asyncio.sleep(0)
        self.finished.append(run.request_id)

    def _advance(
        self, run: link_pb2.Run, choice: int, states: dict[int, list[int]], step: int
    ) -> link_pb2.SequenceOutput:
        tokens = states[choice]
        token = self.script.next_token(choice, tokens[-1], len(tokens))
        tokens.append(token)
        output = link_pb2.SequenceOutput(
            request_id=run.request_id, choice=choice, token_ids=[token], cached_tokens=self.script.cached_tokens
        )
        if run.HasField("logprobs"):
            output.logprobs.append(_logprobs(token, run.logprobs))
        if step == 0:
            output.phases.CopyFrom(PHASES)
        if token in run.stop_token_ids and step >= run.min_tokens:
            output.finish_reason = inference_pb2.FINISH_REASON_STOP
        elif step + 1 == run.max_tokens:
            output.finish_reason = inference_pb2.FINISH_REASON_LENGTH
        if output.finish_reason:
            output.phases.CopyFrom(LAST_PHASES)
            del states[choice]
        return output

    def _send_step(self, outputs: list[link_pb2.SequenceOutput], run: link_pb2.Run, step: int) -> None:
        self._steps += 1
        load = self.load
        load.num_running, load.num_decode_steps = len(self._running), load.num_decode_steps + 1
        load.decode_tokens += len(outputs)
        if step == 0:
            load.prefill_tokens += len(run.prompt_tokens)
            load.num_prefill_steps += 1
        message = link_pb2.StepOutput(step=self._steps, outputs=outputs, load=load)
        self._send(link_pb2.WorkerMessage(step=message))


def _logprobs(token: int, num_top: int) -> inference_pb2.PositionLogprobs:
    chosen = inference_pb2.TokenLogprob(token_id=token, logprob=-0.5)
    others = [inference_pb2.TokenLogprob(token_id=(token + i) % 256, logprob=-1.0 - i) for i in range(1, num_top)]
    return inference_pb2.PositionLogprobs(chosen=chosen, top=[chosen, *others][:num_top])


@asynccontextmanager
async def serving(worker: FakeWorker, port: int = 0) -> AsyncIterator[int]:
    """Serve it on a loopback port, which is given back."""
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    link_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)
