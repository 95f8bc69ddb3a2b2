"""The gateway's libraries without a gateway: what a token costs whoever reads a link with grpc.aio, and writes to its
clients with grpc.aio or uvicorn.

It is told of steps over a worker's link, as a gateway is, and reads no message of it; at each step every stream is sent
a message that was made beforehand. No request is checked, routed or recorded, no text is made. Run as a module with the
file of the cluster's key and the worker's address; it prints the addresses of its two fronts and serves until its
standard input ends.
"""

import asyncio
import json
import secrets
import socket
import sys
from pathlib import Path
from typing import Any

import grpc
import uvicorn
import uvloop

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc import link_pb2
from moonshard.rpc.link import PROTOCOL_VERSION
from moonshard.rpc.server.door import open_stream
from moonshard.serving.config.cluster_key import key_of
from moonshard.serving.deploy.heap import keep_for_life
from moonshard.serving.gateway.aside import SWITCH_INTERVAL_S
from moonshard.serving.gateway.grpc.front import SERVICE
from moonshard.serving.gateway.workers.link import METHOD

PROMPT = pb.GenerateResponse(prompt=pb.TokenIds(ids=[1])).SerializeToString()
TOKEN = pb.GenerateResponse(delta=pb.Delta(token_ids=[1], text=" word")).SerializeToString()
SUMMARY = pb.GenerateResponse(summary=pb.Summary(request_id="0" * 32, model="bare")).SerializeToString()
CHOICE = {"index": 0, "text": " word", "logprobs": None, "finish_reason": None, "stop_reason": None}
HEAD = {"id": "cmpl-" + "0" * 32, "object": "text_completion", "created": 1, "model": "bare"}
CHUNK = b"data: " + json.dumps({**HEAD, "choices": [CHOICE]}).encode() + b"\n\n"
DONE = b"data: [DONE]\n\n"


class Steps:
    """Wakes all streams at each step."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def next(self) -> asyncio.Future[None]:
        step = asyncio.get_running_loop().create_future()
        self._waiting.append(step)
        return step

    async def follow(self, key: bytes, address: str) -> None:
        """Reads the link of the worker at `address` until it ends."""
        async with grpc.aio.insecure_channel(address) as channel:
            call = await open_stream(channel, METHOD, key, int(address.rpartition(":")[2]), bytes)
            hello = link_pb2.Hello(protocol_version=PROTOCOL_VERSION, gateway_epoch=secrets.token_bytes(16))
            await call.write(link_pb2.GatewayMessage(hello=hello))
            while isinstance(await call.read(), bytes):
                waiting, self._waiting = self._waiting, []
                for step in waiting:
                    if not step.done():
                        step.set_result(None)


class BareGrpc:
    """Answers `Generate` with as many tokens as are asked for."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    async def generate(self, request: bytes, context: grpc.aio.ServicerContext) -> None:
        await context.write(PROMPT)
        for _ in range(pb.GenerateRequest.FromString(request).stop.max_tokens):
            await self._steps.next()
            await context.write(TOKEN)
        await context.write(SUMMARY)


class BareHttp:
    """An ASGI app that answers every request as a streamed completion, with as many chunks as are asked for."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    async def __call__(self, _scope: Any, receive: Any, send: Any) -> None:
        body, has_more = b"", True
        while has_more:
            message = await receive()
            body, has_more = body + message.get("body", b""), message.get("more_body", False)
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(json.loads(body)["max_tokens"]):
            await self._steps.next()
            await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


async def _main(key_file: Path, worker: str) -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    steps = Steps()
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    handlers = {"Generate": grpc.unary_stream_rpc_method_handler(BareGrpc(steps).generate)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    listener = socket.create_server(("127.0.0.1", 0))
    options = uvicorn.Config(BareHttp(steps), ws="none", lifespan="off", log_config=None, access_log=False)
    http = uvicorn.Server(options)
    tasks = [
        asyncio.create_task(http.serve(sockets=[listener])),
        asyncio.create_task(steps.follow(key_of(key_file).proofs, worker)),
    ]
    keep_for_life()
    sys.stdout.write(f"127.0.0.1:{port} http://127.0.0.1:{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await server.stop(None)


if __name__ == "__main__":
    uvloop.run(_main(Path(sys.argv[1]), sys.argv[2]))  # as a gateway does
