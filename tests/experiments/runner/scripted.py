"""A gateway that answers by a script: how many requests are there at once is known, and one length is refused."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from threading import Thread

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from moonshard.rpc.server.server import build_server
from moonshard.rpc.status import Overloaded, abort

REFUSED = 13  # a prompt of so many tokens is refused


class Scripted(InferenceServicer):
    """Answers with the tokens asked for, once `opened`; keeps who came, and how many were there at once."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.came: list[pb.GenerateRequest] = []
        self.sessions: list[str] = []
        self.num_now = self.most = 0
        self.all_came = asyncio.Event()
        self.awaited = 0
        self.fingerprint = "one"

    async def GetModelInfo(self, request, context):
        return pb.ModelInfo(model="m", max_context_tokens=1000, vocab_size=50, fingerprint=self.fingerprint)

    async def Generate(self, request, context):
        self.came.append(request)
        self.sessions.append(dict(context.invocation_metadata()).get("x-session-affinity", ""))
        self.num_now += 1
        self.most = max(self.most, self.num_now)
        if len(self.came) == self.awaited:
            self.all_came.set()
        try:
            prompt = list(request.tokens.ids)
            if len(prompt) == REFUSED:
                await abort(context, Overloaded("no room", retry_after_s=1))
            yield pb.GenerateResponse(prompt=pb.TokenIds(ids=prompt))
            await self.opened.wait()
            for index in range(request.stop.max_tokens):
                reason = pb.FINISH_REASON_LENGTH if index + 1 == request.stop.max_tokens else None
                yield pb.GenerateResponse(delta=pb.Delta(token_ids=[index], finish_reason=reason))
            usage = pb.Usage(prompt_tokens=len(prompt), completion_tokens=request.stop.max_tokens)
            yield pb.GenerateResponse(summary=pb.Summary(request_id=request.request_id, usage=usage))
        finally:
            self.num_now -= 1


@asynccontextmanager
async def listening(scripted: Scripted) -> AsyncIterator[str]:
    """The gateway's host:port, during the block."""
    add = partial(add_InferenceServicer_to_server, scripted)
    server = build_server(host="127.0.0.1", port=0, add_servicers=[add], service_names=[])
    await server.start()
    await server.set_serving(True)
    yield f"127.0.0.1:{server.port}"
    await server.stop(0)


@contextmanager
def listening_aside(scripted: Scripted) -> Iterator[str]:
    """host:port of it during the block, on an event loop in a thread of its own: the block may be without one."""
    told: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def listen() -> None:
        closed = asyncio.Event()
        async with listening(scripted) as address:
            told.set_result((address, asyncio.get_running_loop(), closed))
            await closed.wait()

    thread = Thread(target=asyncio.run, args=(listen(),))
    thread.start()
    address, loop, closed = told.result()
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(closed.set)
        thread.join()
