"""A worker without a model that speaks the Link: a step every so often, a token for each request in it.

What a gateway adds shows beside it: the worker costs next to nothing, and is always on time. Run as a module; it prints
its port and serves until its standard input ends. Left out: prefill, KV, and everything that could go wrong.
"""

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator

import grpc

from moonshard.rpc import link_pb2, link_pb2_grpc
from moonshard.rpc.inference_pb2 import FINISH_REASON_LENGTH
from moonshard.rpc.link import PROTOCOL_VERSION

STEP_S = 0.05
VOCAB_SIZE = 1000
NUM_BLOCKS, BLOCK_SIZE = 100_000, 64


class ScriptedWorker(link_pb2_grpc.WorkerServicer):
    """Any number of links, each with requests of its own."""

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
        """At fixed times, whatever the last step took."""
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
        output = link_pb2.SequenceOutput(request_id=request_id, token_ids=[1], phases=link_pb2.WorkerPhases())
        if not left[request_id]:
            output.finish_reason = FINISH_REASON_LENGTH
            del left[request_id]
        return output


async def _main() -> None:
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    link_pb2_grpc.add_WorkerServicer_to_server(ScriptedWorker(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(_main())
