"""The pipeline behind both fronts: from a checked request to a stream of events.

Knows neither HTTP nor the public gRPC service. Every request that is let in ends exactly once: with a Summary or with
one error. Where it runs, and runs on when a worker is lost, is `attempts`'.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from moonshard.kv.prefix import block_names, root_name
from moonshard.models.folder.generation import GenerationDefaults
from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc import link_pb2
from moonshard.rpc.status import InternalError, Unavailable
from moonshard.serving.config.tenants import Salts
from moonshard.serving.control.dispatch.queue_bound import QueueBound, TooManyWaiting
from moonshard.serving.control.members.fleet import ModelLimits
from moonshard.serving.control.request import BACKGROUND
from moonshard.serving.control.routing.router import Affinity
from moonshard.serving.control.sampling_parameters import PARAMETERS
from moonshard.serving.gateway.aside import Aside
from moonshard.serving.gateway.pipeline.attempts import Attempts, Sent
from moonshard.serving.gateway.pipeline.choice import CallsMade, ChoiceStream, Opening, joined
from moonshard.serving.gateway.pipeline.grammars import AnswerGrammars, grammar_of
from moonshard.serving.gateway.pipeline.handoffs import Handoffs
from moonshard.serving.gateway.pipeline.model import PromptLimit, ServedModel
from moonshard.serving.gateway.pipeline.seeds import Seeds
from moonshard.serving.gateway.records.accounts.rates import TokenRates
from moonshard.serving.gateway.records.events import FirstDelivered, RequestTokenized, TokensArrived
from moonshard.serving.gateway.records.log import RequestLog, RequestLogs
from moonshard.serving.gateway.records.spans import mark
from moonshard.serving.gateway.refusals import LimitReached
from moonshard.serving.gateway.request import (
    GenerationRequest,
    TokenPrompt,
    check_parameters,
    check_prompt_logprobs,
    check_token_ids,
    stop_tokens,
)
from moonshard.serving.gateway.workers.inbox import Arrival
from moonshard.serving.gateway.workers.pool import LinkPool
from moonshard.serving.observe.spans.context import TraceContext, read_context

type GenerationEvent = Routed | pb.TokenIds | pb.PromptLogprobs | CallsMade | pb.Delta | pb.Summary

DRAINING_RETRY_AFTER_S = 5.0
OVERLOADED_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Routed:
    """Where a request's prompt is computed, and whether that is where its affinity key was last."""

    worker: str
    affinity: Affinity | None  # None: it has no affinity key

    def again(self, worker: str) -> "Routed":
        """The request was lost there before its first token, and has been sent to another worker."""
        is_moved = self.affinity == "hit" and worker != self.worker
        return Routed(worker, "moved" if is_moved else self.affinity)

    def headers(self) -> dict[str, str]:
        """What clients are told, as HTTP headers; over gRPC it is metadata."""
        affinity = {} if self.affinity is None else {"x-moonshard-affinity": self.affinity}
        return {"x-moonshard-worker": self.worker, **affinity}


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmittedRequest:
    """A request that was let in, and what it was measured against."""

    request: GenerationRequest
    limits: ModelLimits
    number: int  # of this gateway


class Gateway:
    """Serves one model over a pool of workers."""

    def __init__(
        self,
        model: ServedModel,
        pool: LinkPool,
        handoffs: Handoffs,
        logs: RequestLogs,
        rates: TokenRates | None,
        *,
        salts: Salts,
        seeds: Seeds,
        max_queued_requests: int,
        max_attempts: int,
    ) -> None:
        self.model = model
        self.pool = pool
        self.handoffs = handoffs
        self.aside = Aside()
        self.is_draining = False
        self._grammars = AnswerGrammars(model.tokenizer, model.defaults)
        self._logs = logs
        self._rates = rates
        self._salts = salts
        self._seeds = seeds
        self._queue = QueueBound(max_queued_requests)
        self._attempts = Attempts(pool, handoffs, max_attempts=max_attempts, may_retry=lambda: not self.is_draining)
        self._idle = asyncio.Event()
        self._idle.set()
        self.on_change: Callable[[], None] = _nothing  # called when a request has its first token or has ended

    @property
    def is_ready(self) -> bool:
        return not self.is_draining and self.pool.is_ready

    @property
    def num_running(self) -> int:
        return self._queue.num_running

    @property
    def num_waiting(self) -> int:
        """How many requests wait for their first token."""
        return self._queue.num_waiting

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def limits(self) -> ModelLimits:
        """Unavailable until a worker has said."""
        if (limits := self.pool.limits) is None:
            raise self.pool.unavailable()
        return limits

    def parent_of(self, headers: Callable[[str], Sequence[str]]) -> TraceContext | None:
        """The client's span, by all values of a header; None where there is none, or no spans are wanted."""
        return read_context(headers) if self._logs.has_spans else None

    async def checked(self, request: GenerationRequest) -> GenerationRequest:
        """The request with its prompt as tokens, once all is checked that can be before it begins. It is no chat.

        Raises RequestError as `generate` does for what is wrong with the request itself.
        """
        self.model.check_name(request.model)
        limits = self.limits()
        check_parameters(request, vocab_size=limits.vocab_size, has_tokenizer=self.model.tokenizer is not None)
        prompt = await self.model.tokenize(request, PromptLimit.to_generate(limits.max_context_tokens))
        max_tokens(request, len(prompt), limits.max_context_tokens)
        check_token_ids(request, "prompt", prompt, limits.vocab_size)
        check_prompt_logprobs(request, len(prompt))
        return replace(request, prompt=TokenPrompt.of(prompt))

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent]:
        """Routed and TokenIds (the prompt), then CallsMade and Deltas, then one Summary. Before the first Delta the
        prompt's log-probabilities, where they are wanted.

        Routed again for each time that its worker is lost before the first token.
        Close it (`aclosing`) to cancel.
        Raises RequestError, before the first event for what is wrong with the request itself.
        """
        with self._logs.opened(request) as log, self._admitted(request) as admission:
            prompt = await self.model.tokenize(request, PromptLimit.to_generate(admission.limits.max_context_tokens))
            run, opening = await self.aside.run(len(prompt), self._make_run, admission, prompt)
            run.grammar = await self._grammars.checked(request, run.grammar, admission.limits.vocab_size)
            mark(run, log.context)
            choices = [self.model.choice(index, request, opening) for index in range(run.n)]
            log.append(
                RequestTokenized(
                    num_prompt_tokens=len(prompt),
                    max_tokens=run.max_tokens + opening.num_forced,
                    num_choices=run.n,
                    num_forced_tokens=opening.num_forced,
                )
            )
            if self._rates is not None:
                self._rates.admit(request.caller.tenant.name, len(prompt))
            is_delivered = False
            async with aclosing(self._stream(admission, run, choices, log)) as events:
                async for event in events:
                    yield event
                    if not is_delivered and isinstance(event, pb.Delta):
                        is_delivered = True
                        log.append(FirstDelivered())
        usage = log.usage()
        if opening.start is not None:
            usage.reasoning_tokens = sum(choice.num_thought_tokens for choice in choices)
        yield pb.Summary(  # outside: closing the generator now is no cancellation
            request_id=request.request_id,
            model=self.model.name,
            usage=usage,
            timing=log.timing,
            seed=run.sampling.seed,
        )

    @contextmanager
    def _admitted(self, request: GenerationRequest) -> Iterator[AdmittedRequest]:
        """Refuses what cannot be served before any work is spent on it; else counts the request in during the block."""
        self.model.check_name(request.model)
        if self.is_draining:
            raise Unavailable("the server is shutting down", retry_after_s=DRAINING_RETRY_AFTER_S)
        limits = self.limits()
        check_parameters(request, vocab_size=limits.vocab_size, has_tokenizer=self.model.tokenizer is not None)
        number = self._queue.enter()
        if isinstance(number, TooManyWaiting):
            raise LimitReached(
                "max_queued_requests",
                f"{number.num_waiting} requests are waiting",
                retry_after_s=OVERLOADED_RETRY_AFTER_S,
                predicted_ttft_s=self.pool.knowledge.dispatcher.least_ttft_s(time.monotonic()),
            )
        self._idle.clear()
        try:
            yield AdmittedRequest(request=request, limits=limits, number=number)
        finally:
            self._queue.leave(number)
            self.on_change()
            if not self._queue.num_running:
                self._idle.set()

    async def _stream(
        self, admission: AdmittedRequest, run: link_pb2.Run, choices: list[ChoiceStream], log: RequestLog
    ) -> AsyncGenerator[Routed | pb.TokenIds | pb.PromptLogprobs | CallsMade | pb.Delta]:
        """The prompt as soon as it was sent; then deltas until every choice has ended."""
        key = admission.request.caller.affinity_key
        placed: Routed | None = None
        async with aclosing(self._attempts.events(run, choices, log, key)) as events:
            async for event in events:
                if isinstance(event, Sent):
                    if placed is None:
                        placed = Routed(event.worker, event.affinity)
                        yield placed
                        yield pb.TokenIds(ids=run.prompt_tokens[: log.tokenized.num_prompt_tokens])
                    elif not log.has_begun:
                        placed = placed.again(event.worker)
                        yield placed
                    continue
                if not log.has_begun:
                    self._queue.begun(admission.number)
                    self.on_change()
                for told in _accept(choices, event, log):
                    yield told

    def _make_run(self, admission: AdmittedRequest, prompt: Sequence[int]) -> tuple[link_pb2.Run, Opening]:
        """What the request asks, without an id, and how choices begin. To workers a forced call's beginning is prompt.

        InvalidArgument where prompt and completion do not fit in the vocabulary and the context.
        """
        request, limits = admission.request, admission.limits
        most = max_tokens(request, len(prompt), limits.max_context_tokens)
        check_token_ids(request, "prompt", prompt, limits.vocab_size)
        check_prompt_logprobs(request, len(prompt))
        opening = self.model.opening(request, prompt)
        begun = () if opening.forced is None else opening.forced.token_ids
        num_tokens = most - len(begun)
        if num_tokens < 1:
            raise request.invalid("max_tokens", f"the call that is forced begins with {len(begun)} tokens")
        prompt = (*prompt, *begun) if begun else prompt
        root = root_name(limits.fingerprint.encode(), limits.dtype.encode(), self._salts.of(request.caller.tenant))
        run = link_pb2.Run(
            prompt_tokens=prompt,
            prefix_root=root,
            block_names=b"".join(block_names(root, prompt, limits.block_size)),
            sampling=engine_sampling(request, self.model.defaults, self._seeds.of(request.caller)),
            stop_token_ids=stop_tokens(
                request, self.model.defaults, limits.vocab_size, call_end=self.model.call_end(request)
            ),
            max_tokens=num_tokens,
            min_tokens=max(0, request.min_tokens - len(begun)),
            n=request.n,
            logprobs=request.num_logprobs,
            priority=request.priority + (BACKGROUND if request.is_background else 0),
            prompt_logprobs=request.num_prompt_logprobs,
            grammar=grammar_of(request, opening, self.model.tokenizer),
        )
        return run, opening


def _nothing() -> None:
    pass


def engine_sampling(
    request: GenerationRequest, defaults: GenerationDefaults, unsaid_seed: int
) -> link_pb2.EngineSampling:
    """Every default filled in: the client's word, else the folder's, else what switches the feature off."""
    said = {"seed": unsaid_seed, **request.sampling}
    values: dict[str, Any] = {}
    for parameter in PARAMETERS:
        value = said.get(parameter.name, getattr(defaults, parameter.name, None))
        values[parameter.name] = parameter.for_engine(parameter.default if value is None else value)
    bias = request.logit_bias
    return link_pb2.EngineSampling(**values, bias_ids=bias.keys(), bias_values=bias.values())


def max_tokens(request: GenerationRequest, num_prompt: int, max_context_tokens: int) -> int:
    """The most tokens each choice may have: what was asked for, else what the prompt leaves of the context.

    Raises:
        ContextLengthExceeded: they do not fit with the prompt; InvalidArgument for the rest.
    """
    if num_prompt == 0:
        raise request.invalid("prompt", "is empty")
    room = max_context_tokens - num_prompt
    if request.max_tokens is not None and request.max_tokens > room:
        excess = f"after a prompt of {num_prompt} tokens, {{}} of {request.max_tokens}"
        raise request.too_long("max_tokens", max_context_tokens, excess)
    allowed = request.max_tokens or min(room, request.default_max_tokens or room)
    if request.min_tokens > allowed:
        raise request.invalid(
            "min_tokens", f"{request.min_tokens} exceeds the {allowed} tokens that the answer may have"
        )
    return allowed


def _accept(
    choices: list[ChoiceStream], arrivals: list[Arrival], log: RequestLog
) -> Iterator[pb.PromptLogprobs | CallsMade | pb.Delta]:
    """What the client is told of what arrived together: of each choice one Delta, or one for each of its calls. What is
    said of the prompt comes first.
    """
    if not log.has_begun:
        outputs = (arrival.output for arrival in arrivals)
        yield from (output.prompt_logprobs for output in outputs if output.HasField("prompt_logprobs"))
    deltas: dict[int, pb.Delta] = {}
    for arrival in arrivals:
        index = arrival.output.choice
        if index >= len(choices):
            yield from deltas.values()  # they are counted already
            raise InternalError(f"the worker answered for choice {index} of {len(choices)}")
        delta = choices[index].accept(arrival.output)
        log.append(TokensArrived(arrival.arrived_ns, arrival.output, delta))
        if delta is None:
            continue
        if (made := choices[index].take_calls()) is not None:
            if (before := deltas.pop(index, None)) is not None:
                yield before
            yield made
        deltas[index] = delta if index not in deltas else joined(deltas[index], delta)
    yield from deltas.values()
