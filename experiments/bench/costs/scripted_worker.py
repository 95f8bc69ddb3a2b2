"""A worker without a model that speaks the Link: a step at fixed intervals, and in it a token for each request.

The worker costs next to nothing and is always on time, so what is measured beyond it is the gateway's. It serves the
public API too, by the same clock, which shows what gRPC itself costs a gateway and its clients. Run as a module with
the file of the cluster's key and the seconds of a step; it prints its port and serves until its standard input ends. It
has no prefill and no KV, and nothing fails.
"""

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import uvloop

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc import inference_pb2_grpc, link_pb2, link_pb2_grpc
from moonshard.rpc.inference_pb2 import FINISH_REASON_LENGTH
from moonshard.rpc.link import PROTOCOL_VERSION
from moonshard.rpc.server.door import Door
from moonshard.serving.config.cluster_key import key_of

STEP_S = 0.05
VOCAB_SIZE = 1000
NUM_BLOCKS, BLOCK_SIZE = 100_000, 64


class ScriptedWorker(link_pb2_grpc.WorkerServicer):
    """Serves any number of links, each with requests of its own."""

    def __init__(self, step_s: float = STEP_S):
        self._step_s = step_s
        self._welcome = link_pb2.Welcome(
            protocol_version=PROTOCOL_VERSION,
            epoch=secrets.token_bytes(16),
            fingerprint="0" * 64,
            role="both",
            dtype="float32",
            vocab_size=VOCAB_SIZE,
            max_context_tokens=8192,
            block_size=BLOCK_SIZE,
            num_partitions=1,
            num_blocks=NUM_BLOCKS,
            max_slots=1024,
        )

    async def Link(
        self, request_iterator: AsyncIterator[link_pb2.GatewayMessage], context: grpc.aio.ServicerContext
    ) -> None:
        left: dict[bytes, int] = {}  # tokens that each request still gets
        await context.write(link_pb2.WorkerMessage(welcome=self._welcome))
        steps = asyncio.create_task(self._step_on(left, context))
        try:
            async for message in request_iterator:
                if message.HasField("run"):
                    left[message.run.request_id] = message.run.max_tokens
                elif message.HasField("cancel"):
                    left.pop(message.cancel.request_id, None)
        finally:
            steps.cancel()

    async def _step_on(self, left: dict[bytes, int], context: grpc.aio.ServicerContext) -> None:
        """Steps at fixed times, whatever the last step took."""
        loop, number = asyncio.get_running_loop(), 0
        begun_s = loop.time()
        while True:
            number += 1
            await asyncio.sleep(begun_s + number * self._step_s - loop.time())
            outputs = [self._output(request_id, left) for request_id in tuple(left)]
            load = link_pb2.WorkerLoad(queued_tokens=[0], active_tokens=[0], free_blocks=[NUM_BLOCKS])
            step = link_pb2.StepOutput(step=number, outputs=outputs, load=load)
            await context.write(link_pb2.WorkerMessage(step=step))

    def _output(self, request_id: bytes, left: dict[bytes, int]) -> link_pb2.SequenceOutput:
        left[request_id] -= 1
        output = link_pb2.SequenceOutput(request_id=request_id, token_ids=[1])
        if not left[request_id]:
            output.finish_reason = FINISH_REASON_LENGTH
            del left[request_id]
        return output


class ScriptedInference(inference_pb2_grpc.InferenceServicer):
    """The public API: each call gets a token at each step, without text."""

    def __init__(self, step_s: float = STEP_S):
        self._step_s = step_s
        self._waiting: set[asyncio.Queue[None]] = set()

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        await context.write(pb.GenerateResponse(prompt=pb.TokenIds(ids=request.tokens.ids)))
        steps = asyncio.Queue[None]()
        self._waiting.add(steps)
        try:
            for left in reversed(range(request.stop.max_tokens)):
                await steps.get()
                reason = pb.FINISH_REASON_UNSPECIFIED if left else pb.FINISH_REASON_LENGTH
                await context.write(pb.GenerateResponse(delta=pb.Delta(token_ids=[1], finish_reason=reason)))
        finally:
            self._waiting.discard(steps)
        await context.write(pb.GenerateResponse(summary=pb.Summary(request_id=request.request_id)))

    async def step_on(self) -> None:
        """Steps at fixed times, whatever the last step took."""
        loop, number = asyncio.get_running_loop(), 0
        begun_s = loop.time()
        while True:
            number += 1
            await asyncio.sleep(begun_s + number * self._step_s - loop.time())
            for steps in self._waiting:
                steps.put_nowait(None)


async def _main(key_file: Path, step_s: float) -> None:
    door = Door(key_of(key_file).proofs, lambda: port, open_services=("/moonshard.v1.Inference/",))
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),), interceptors=(door,))
    link_pb2_grpc.add_WorkerServicer_to_server(ScriptedWorker(step_s), server)
    inference = ScriptedInference(step_s)
    inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    stepping = asyncio.create_task(inference.step_on())
    await asyncio.to_thread(sys.stdin.read)
    stepping.cancel()
    await server.stop(None)


if __name__ == "__main__":
    uvloop.run(_main(Path(sys.argv[1]), float(sys.argv[2])))  # as a gateway does
