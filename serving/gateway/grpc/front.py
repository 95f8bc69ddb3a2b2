"""The gRPC front: the public `Inference` service on the same pipeline as HTTP.

The pipeline's events are this API's messages already. Written with `context.write`, not as a generator: gRPC does not
close the generator of a cancelled call at once, and a cancelled call must free its slot at once.
"""

import asyncio
import secrets
import time
from collections.abc import Coroutine, Mapping
from contextlib import aclosing
from dataclasses import replace

import grpc

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc import inference_pb2_grpc
from moonshard.rpc.status import DeadlineExceeded, RequestError, abort
from moonshard.serving.config.tenants import Tenants
from moonshard.serving.control.sampling_parameters import PARAMETERS
from moonshard.serving.gateway.caller import IDEMPOTENCY_METADATA, metadata_value, metadata_values, read_caller
from moonshard.serving.gateway.forms import not_together
from moonshard.serving.gateway.grpc.chats import calls_delta, chat_prompt, structured_outputs, tool_use
from moonshard.serving.gateway.intake.bounds import TOKENIZED_CONTEXTS
from moonshard.serving.gateway.pipeline.choice import CallsMade
from moonshard.serving.gateway.pipeline.generation import Gateway, Routed
from moonshard.serving.gateway.pipeline.model import PromptLimit
from moonshard.serving.gateway.request import ChatPrompt, GenerationRequest, TextPrompt, TokenPrompt

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"]
NUM_CONTEXTS = {"Tokenize": TOKENIZED_CONTEXTS, "Detokenize": TOKENIZED_CONTEXTS}  # of a text, where not 1
JSON_NAMES = frozenset(
    {  # which `chats` decodes
        pb.Tool.DESCRIPTOR.fields_by_name["parameters"].full_name,
        pb.ChatPrompt.DESCRIPTOR.fields_by_name["template_kwargs"].full_name,
        pb.StructuredOutputs.DESCRIPTOR.fields_by_name["json_schema"].full_name,
    }
)
_SPELLING: Mapping[str, str] = {
    **{name: f"sampling.{name}" for name in (*(each.name for each in PARAMETERS), "logit_bias")},
    **{name: f"stop.{name}" for name in ("max_tokens", "min_tokens", "stop", "stop_token_ids")},
    "num_logprobs": "logprobs",
    "num_prompt_logprobs": "prompt_logprobs",
    "tool_choice": "require_tool_call",
    "ignore_eos": "stop.ignore_eos",
    **{name: f"chat.{name}" for name in ("tools", "template_kwargs", "reasoning_effort")},
}


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """The service, behind `GrpcGate`, which has checked keys and sizes."""

    def __init__(self, gateway: Gateway, *, version: str, tenants: Tenants) -> None:
        self._gateway = gateway
        self._tenants = tenants
        self._version = version

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        work = self._generate(request, context, received_ns=time.perf_counter_ns())
        del request  # it may be large, and would be held until the answer ends
        await _answer(context, work)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext) -> pb.ModelInfo:
        return await _answer(context, self._model_info(request))

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        work = self._tokenize(request)
        del request
        return await _answer(context, work)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        return await _answer(context, self._detokenize(request))

    async def _generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext, *, received_ns: int
    ) -> None:
        caller = read_caller(self._tenants, metadata_value(context), idempotency=IDEMPOTENCY_METADATA)
        parent = self._gateway.parent_of(metadata_values(context))
        asked = await self._gateway.aside.run(request.ByteSize(), generation_request, request, received_ns=received_ns)
        del request
        asked = replace(asked, caller=caller, parent=parent)
        is_placed = False
        async with aclosing(self._gateway.generate(asked)) as events:
            async for event in events:
                if isinstance(event, pb.Delta):
                    await context.write(pb.GenerateResponse(delta=event))
                elif isinstance(event, CallsMade):
                    await context.write(pb.GenerateResponse(delta=calls_delta(event)))
                elif isinstance(event, Routed) and is_placed:
                    context.set_trailing_metadata(tuple(event.headers().items()))
                elif isinstance(event, Routed):
                    await context.send_initial_metadata(tuple(event.headers().items()))
                    is_placed = True
                elif isinstance(event, pb.TokenIds):
                    await context.write(pb.GenerateResponse(prompt=event))
                elif isinstance(event, pb.PromptLogprobs):
                    await context.write(pb.GenerateResponse(prompt_logprobs=event))
                else:
                    await context.write(pb.GenerateResponse(summary=event))

    async def _model_info(self, request: pb.GetModelInfoRequest) -> pb.ModelInfo:
        model, limits = self._gateway.model, self._gateway.limits()
        model.check_name(request.model)
        return pb.ModelInfo(
            model=model.name,
            max_context_tokens=limits.max_context_tokens,
            vocab_size=limits.vocab_size,
            stop_token_ids=sorted(model.defaults.stop_token_ids),
            has_tokenizer=model.tokenizer is not None,
            dtype=limits.dtype,
            fingerprint=limits.fingerprint,
            version=self._version,
        )

    async def _tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        self._gateway.model.check_name(request.model)
        asked = await self._gateway.aside.run(request.ByteSize(), request_to_tokenize, request)
        del request
        context_tokens = self._gateway.limits().max_context_tokens
        ids = await self._gateway.model.tokenize(asked, PromptLimit.to_tokenize(context_tokens))
        return pb.TokenizeResponse(ids=ids, max_context_tokens=context_tokens)

    async def _detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        self._gateway.model.check_name(request.model)
        most = TOKENIZED_CONTEXTS * self._gateway.limits().max_context_tokens
        return pb.DetokenizeResponse(text=await self._gateway.model.detokenize(request.ids, most, field="ids"))


def request_to_tokenize(request: pb.TokenizeRequest) -> GenerationRequest:
    """InvalidArgument for a chat that is not well formed."""
    prompt = chat_prompt(request.chat) if request.HasField("chat") else TextPrompt(request.text)
    use = tool_use(request.chat)
    return GenerationRequest(request_id="", received_ns=0, prompt=prompt, tool_use=use, spelling=_SPELLING)


def generation_request(request: pb.GenerateRequest, *, received_ns: int) -> GenerationRequest:
    """Unset stays unset: defaults are filled in by the pipeline. InvalidArgument for a chat that is not well formed."""
    sampling, stop, form = request.sampling, request.stop, structured_outputs(request.structured_outputs)
    for name in ("forced_function", "require_tool_call"):
        if form is not None and getattr(request, name):
            raise not_together(form.field, name)
    return GenerationRequest(
        request_id=request.request_id or secrets.token_hex(16),
        received_ns=received_ns,
        prompt=_prompt(request),
        model=request.model,
        sampling={each.name: getattr(sampling, each.name) for each in PARAMETERS if sampling.HasField(each.name)},
        logit_bias=dict(sampling.logit_bias),
        max_tokens=stop.max_tokens if stop.HasField("max_tokens") else None,
        min_tokens=stop.min_tokens,
        stop=list(stop.stop),
        stop_token_ids=list(stop.stop_token_ids),
        ignore_eos=stop.ignore_eos,
        n=request.n if request.HasField("n") else 1,
        num_logprobs=request.logprobs if request.HasField("logprobs") else None,
        priority=request.priority,
        num_prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
        tool_use=tool_use(
            request.chat,
            request.forced_function,
            is_single=request.single_tool_call,
            is_required=request.require_tool_call,
        ),
        form=form,
        spelling=_SPELLING,
    )


def _prompt(request: pb.GenerateRequest) -> TextPrompt | TokenPrompt | ChatPrompt:
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text)
        case "chat":
            return chat_prompt(request.chat)
        case _:  # no prompt at all is an empty one
            return TokenPrompt.of(request.tokens.ids)


async def _answer[T](context: grpc.aio.ServicerContext, work: Coroutine[None, None, T]) -> T:
    """The work's result within the call's deadline; its errors as the call's status."""
    try:
        async with asyncio.timeout(context.time_remaining()):
            return await work
    except TimeoutError:
        await abort(context, DeadlineExceeded("the call's deadline passed"))
    except RequestError as error:
        await abort(context, error)
