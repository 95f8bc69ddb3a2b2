"""The public gRPC API: `Client` for notebooks and scripts, `AsyncClient` with the same surface for asyncio.

    with Client() as client:
        print(client.generate("The moon", max_tokens=16).text)
        with client.stream([{"role": "user", "content": "Hi"}], temperature=0) as stream:
            for delta in stream:
                print(delta.text, end="")
        print(stream.summary.timing.phases())

Needs grpcio with its health messages and google.rpc's, nothing else. Every failure is a
`moonshard.rpc.status.RequestError`. The two clients are built on gRPC's two Python APIs rather than one on the other,
so that neither hides a thread or an event loop. Nothing is retried: only the caller knows what may be sent twice.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc import inference_pb2_grpc
from moonshard.rpc.codec import (
    collect,
    decode_delta,
    decode_model_info,
    decode_prompt_logprobs,
    decode_summary,
    encode_generate,
    encode_tokenize,
)
from moonshard.rpc.status import Cancelled, InternalError, Unavailable, from_rpc_error
from moonshard.rpc.types import Completion, Delta, GenerateOptions, ModelInfo, PositionLogprobs, Prompt, Summary

Metadata = Sequence[tuple[str, str]]

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),  # a long prompt's token ids pass gRPC's 4 MiB; the server bounds requests
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),  # a stream may be silent for long: notice a server that vanished
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),  # a restarted server is found at once, not after gRPC's two minutes
    ("grpc.enable_http_proxy", 0),  # a proxy variable meant for the web must not swallow a loopback target
)


def _authorization(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """ValueError for what cannot be sent."""
    if api_key is None:
        return ()
    if not (api_key.isascii() and api_key.isprintable()):
        raise ValueError("api_key: expected printable ASCII")
    return (("authorization", f"Bearer {api_key}"),)


class _Arrivals:
    """What has arrived of one stream, and when, on this process's clock."""

    def __init__(self) -> None:
        self._start_ns = time.perf_counter_ns()
        self._prompt_token_ids: tuple[int, ...] | None = None
        self._summary: Summary | None = None
        self.prompt_logprobs: tuple[PositionLogprobs | None, ...] = ()  # before the first delta, where asked for
        self._client_ttft_ms: float | None = None
        self._client_e2e_ms: float | None = None

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt's token ids, as the model saw them. Raises RuntimeError before the first event."""
        if self._prompt_token_ids is None:
            raise RuntimeError("the prompt's token ids come with the first event of the stream")
        return self._prompt_token_ids

    @property
    def summary(self) -> Summary:
        """Raises RuntimeError before the end of the stream."""
        if self._summary is None:
            raise RuntimeError("the summary comes at the end of the stream")
        return self._summary

    @property
    def client_ttft_ms(self) -> float | None:
        """Milliseconds from the call to the first token here; None while there is none."""
        return self._client_ttft_ms

    @property
    def client_e2e_ms(self) -> float | None:
        """Milliseconds from the call to the summary here; None while there is none."""
        return self._client_e2e_ms

    def _accept(self, response: pb.GenerateResponse) -> Delta | None:
        """Takes one event in; gives its delta where it is one. Events of a newer server are passed over."""
        match response.WhichOneof("event"):
            case "prompt":
                self._prompt_token_ids = tuple(response.prompt.ids)
            case "prompt_logprobs":
                self.prompt_logprobs = decode_prompt_logprobs(self.prompt_token_ids, response.prompt_logprobs)
            case "summary":
                self._client_e2e_ms = self._elapsed_ms()
                self._summary = decode_summary(response.summary)
            case "delta":
                if response.delta.token_ids and self._client_ttft_ms is None:
                    self._client_ttft_ms = self._elapsed_ms()
                return decode_delta(response.delta)
        return None

    def _check_whole(self) -> None:
        if self._summary is None or self._prompt_token_ids is None:
            raise InternalError("the stream ended without its prompt and summary")

    def _elapsed_ms(self) -> float:
        return (time.perf_counter_ns() - self._start_ns) / 1e6


class Stream(_Arrivals):
    """The deltas of one request, as they come. As a context manager it cancels what was not read to the end."""

    def __init__(self, start: Callable[[], Any]):
        super().__init__()
        self._call = start()

    def headers(self) -> dict[str, str]:
        """What the server said before the answer, such as `x-moonshard-worker`; waits for it."""
        return {key: value for key, value in self._call.initial_metadata() if isinstance(value, str)}

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        while True:
            try:
                response = next(self._call)
            except StopIteration:
                self._check_whole()
                raise
            except grpc.RpcError as error:
                raise from_rpc_error(error) from error
            if (delta := self._accept(response)) is not None:
                return delta

    def cancel(self) -> None:
        """Frees the request on the server; from any thread. A reader then gets Cancelled."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.cancel()


class AsyncStream(_Arrivals):
    """As `Stream`, with `async for` and `async with`."""

    def __init__(self, start: Callable[[], Any]):
        super().__init__()
        self._call = start()

    async def headers(self) -> dict[str, str]:
        """What the server said before the answer, such as `x-moonshard-worker`; waits for it."""
        return {key: value for key, value in await self._call.initial_metadata() if isinstance(value, str)}

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while (response := await self._read()) is not None:
            if (delta := self._accept(response)) is not None:
                return delta
        self._check_whole()
        raise StopAsyncIteration

    def cancel(self) -> None:
        """Frees the request on the server. A reader then gets Cancelled."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.cancel()

    async def _read(self) -> pb.GenerateResponse | None:
        """The next event; None at the end."""
        try:
            return await self._call.read() or None  # gRPC's end mark is falsy, a message never
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            # gRPC says a cancelled call as it says a cancelled task; only the first is ours to translate.
            task = asyncio.current_task()
            if not self._call.cancelled() or (task is not None and task.cancelling()):
                raise
            raise Cancelled("the stream was cancelled here") from None


class Client:
    """A channel to a gateway. Connects on first use; safe to share between threads.

    `credentials` as `moonshard.rpc.tls.channel_credentials` gives them; None is plain text. `api_key` goes with
    every call. `timeout_s` is the deadline of every call that does not name its own; None is none.
    """

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        credentials: grpc.ChannelCredentials | None = None,
        api_key: str | None = None,
        timeout_s: float | None = None,
    ):
        if credentials is None:
            self._channel = grpc.insecure_channel(target, CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(target, credentials, CHANNEL_OPTIONS)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        stub = health_pb2_grpc.HealthStub(self._channel)
        self._check_health = stub.Check  # pyright: ignore[reportAttributeAccessIssue]  # typeshed leaves it out
        self._timeout_s = timeout_s
        self._metadata = _authorization(api_key)

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """The whole answer to a text, token ids, or a chat (a list of {"role", "content"})."""
        with self.stream(prompt, timeout_s=timeout_s, metadata=metadata, **options) as stream:
            deltas = list(stream)
        return collect(stream.prompt_token_ids, deltas, stream.summary, stream.prompt_logprobs)

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """Sends the request and gives its deltas as they come. `metadata` travels as headers, such as `traceparent`."""
        request = encode_generate(prompt, options)
        deadline_s = self._timeout_s if timeout_s is None else timeout_s
        return Stream(
            lambda: self._inference.Generate(request, timeout=deadline_s, metadata=(*self._metadata, *metadata))
        )

    def model_info(self, model: str = "") -> ModelInfo:
        return decode_model_info(self._ask(self._inference.GetModelInfo, pb.GetModelInfoRequest(model=model)))

    def tokenize(self, prompt: Prompt, *, model: str = "") -> tuple[int, ...]:
        """The token ids of a text, or of a chat under the model's template."""
        return tuple(self._ask(self._inference.Tokenize, encode_tokenize(prompt, model)).ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        return self._ask(self._inference.Detokenize, pb.DetokenizeRequest(model=model, ids=token_ids)).text

    def health(self, service: str = "") -> bool:
        """Whether the server is there and takes requests. Raises NotFound for a service it does not have."""
        try:
            answer = self._ask(self._check_health, health_pb2.HealthCheckRequest(service=service))
        except Unavailable:
            return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    def close(self) -> None:
        """Cancels what is still running."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ask(self, method: Callable[..., Any], request: Message) -> Any:
        try:
            return method(request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error


class AsyncClient:
    """As `Client`, for one running event loop, in which it must be made."""

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        credentials: grpc.ChannelCredentials | None = None,
        api_key: str | None = None,
        timeout_s: float | None = None,
    ):
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, CHANNEL_OPTIONS)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        stub = health_pb2_grpc.HealthStub(self._channel)
        self._check_health = stub.Check  # pyright: ignore[reportAttributeAccessIssue]  # typeshed leaves it out
        self._timeout_s = timeout_s
        self._metadata = _authorization(api_key)

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        async with self.stream(prompt, timeout_s=timeout_s, metadata=metadata, **options) as stream:
            deltas = [delta async for delta in stream]
        return collect(stream.prompt_token_ids, deltas, stream.summary, stream.prompt_logprobs)

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream:
        request = encode_generate(prompt, options)
        deadline_s = self._timeout_s if timeout_s is None else timeout_s
        return AsyncStream(
            lambda: self._inference.Generate(request, timeout=deadline_s, metadata=(*self._metadata, *metadata))
        )

    async def model_info(self, model: str = "") -> ModelInfo:
        return decode_model_info(await self._ask(self._inference.GetModelInfo, pb.GetModelInfoRequest(model=model)))

    async def tokenize(self, prompt: Prompt, *, model: str = "") -> tuple[int, ...]:
        return tuple((await self._ask(self._inference.Tokenize, encode_tokenize(prompt, model))).ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        return (await self._ask(self._inference.Detokenize, pb.DetokenizeRequest(model=model, ids=token_ids))).text

    async def health(self, service: str = "") -> bool:
        try:
            answer = await self._ask(self._check_health, health_pb2.HealthCheckRequest(service=service))
        except Unavailable:
            return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def _ask(self, method: Callable[..., Awaitable[Any]], request: Message) -> Any:
        try:
            return await method(request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
