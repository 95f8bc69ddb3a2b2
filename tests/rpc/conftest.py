"""A scripted Inference service on loopback: it answers what the test wrote down and keeps what it was asked."""

import asyncio
import socket
from collections.abc import AsyncIterator
from functools import partial

import pytest

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from moonshard.rpc.server.server import BoundServer, build_server
from moonshard.rpc.status import RequestError, abort

INFERENCE = "moonshard.v1.Inference"


class ScriptedInference(InferenceServicer):
    def __init__(self):
        self.script: list[pb.GenerateResponse | RequestError] = []
        self.holds = False  # after the script, stay silent until the client leaves
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.ended = asyncio.Event()

    async def Generate(self, request, context):
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            for event in self.script:
                if isinstance(event, RequestError):
                    await abort(context, event)
                yield event
            if self.holds:
                await asyncio.Event().wait()
        finally:  # not `except CancelledError`: a cancel during a send closes the generator at its yield instead
            self.ended.set()

    async def GetModelInfo(self, request, context):
        return pb.ModelInfo(model=request.model or "tiny", vocab_size=256, stop_token_ids=[1, 2], has_tokenizer=True)

    async def Tokenize(self, request, context):
        text = request.text or "".join(message.content for message in request.chat.messages)
        return pb.TokenizeResponse(ids=text.encode())

    async def Detokenize(self, request, context):
        return pb.DetokenizeResponse(text=bytes(request.ids).decode())


def answer() -> list[pb.GenerateResponse]:
    """Two choices, interleaved, one ended by a token and one by its length."""
    first = pb.PositionLogprobs(chosen=pb.TokenLogprob(token_id=7, logprob=-0.5))
    first.top.add(token_id=9, logprob=-0.25)
    summary = pb.Summary(
        request_id="r1",
        model="tiny",
        usage=pb.Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=2),
        timing=pb.Timing(e2e_ms=10, ttft_ms=3, gateway_queue_ms=1, first_token_ms=2, decode_ms=6.5, finish_ms=0.5),
        seed=2**64 - 1,
    )
    deltas = [
        pb.Delta(choice=1, token_ids=[5], text="b"),
        pb.Delta(choice=0, token_ids=[7], text="a", logprobs=[first]),
        pb.Delta(choice=1, token_ids=[6], text="B", finish_reason=pb.FINISH_REASON_LENGTH),
        pb.Delta(choice=0, token_ids=[0], text="A", finish_reason=pb.FINISH_REASON_STOP, stop_token_id=0),
    ]
    events = [pb.GenerateResponse(prompt=pb.TokenIds(ids=[3, 4, 5]))]
    events += [pb.GenerateResponse(delta=delta) for delta in deltas]
    return [*events, pb.GenerateResponse(summary=summary)]


@pytest.fixture
def inference() -> ScriptedInference:
    servicer = ScriptedInference()
    servicer.script = list(answer())
    return servicer


@pytest.fixture
async def server(inference: ScriptedInference) -> AsyncIterator[BoundServer]:
    add = partial(add_InferenceServicer_to_server, inference)
    bound = build_server(host="127.0.0.1", port=0, add_servicers=[add], service_names=[INFERENCE])
    await bound.start()
    await bound.set_serving(True)
    yield bound
    await bound.stop(0)


@pytest.fixture
def target(server: BoundServer) -> str:
    return f"127.0.0.1:{server.port}"


@pytest.fixture
def free_port() -> int:
    """A port that nothing listens on: bound once and let go."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
