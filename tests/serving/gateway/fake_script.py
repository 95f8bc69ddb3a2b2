"""What a scripted worker answers: tokens by arithmetic, and the places where a test stops it or makes it fail.

The next token is a function of the choice, its last token and its position, so that a test can say beforehand what a
stream must hold, whoever generates it and however often it moves. `fake_worker` has the stream, which the legs of a
handoff (`fake_legs`) need not know.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from moonshard.rpc import inference_pb2, link_pb2

VOCAB_SIZE = 2048
MAX_CONTEXT_TOKENS = 2_000
BLOCK_SIZE = 16
NUM_BLOCKS = 64
PREFILLED = link_pb2.WorkerPhases(queue_ms=0.01, prefill_ms=0.02)
LANDED = link_pb2.WorkerPhases(land_ms=0.03, join_ms=0.04)
DECODE_MS = 0.5


def arithmetic(choice: int, last_token: int, position: int) -> int:
    return (last_token * 7 + position * 3 + choice + 1) % 256


def expected_tokens(prompt: Iterable[int], num_tokens: int, choice: int = 0) -> list[int]:
    prompt = list(prompt)
    tokens = prompt[:]
    for _ in range(num_tokens):
        tokens.append(arithmetic(choice, tokens[-1], len(tokens)))
    return tokens[len(prompt) :]


def overloaded(retry_after_s: float = 1.0) -> link_pb2.Failed:
    """What a decode worker without room answers to Reserve."""
    return link_pb2.Failed(
        code=8,
        message="no room for this prompt",
        retry_after_s=retry_after_s,
        cause=link_pb2.HANDOFF_CAUSE_OVERLOADED,
    )


class LegFailed(Exception):
    """The script says that a request or a leg of a handoff ends here."""

    def __init__(self, failed: link_pb2.Failed):
        super().__init__(failed.message)
        self.failed = failed


class Points:
    """Places in a worker's course: a test may hold the worker at one, wait until it gets there, or fail it there.

    Prefill leg: "chunk 0", "chunk 1", ..., "first_tokens", "last_chunk". Decode leg: "target", "land 0", ..., "start".
    Whoever generates: "step 0", ..., counted from the first step that this worker makes for the request.
    """

    def __init__(self) -> None:
        self.failures: dict[str, link_pb2.Failed] = {}
        self._held: set[str] = set()
        self._reached: set[str] = set()
        self._changed = asyncio.Event()

    def hold(self, *points: str) -> None:
        self._held.update(points)

    def release(self, *points: str) -> None:
        """Releases these points, or all where none is named."""
        self._held.difference_update(points or set(self._held))
        self._wake()

    async def reached(self, point: str) -> None:
        """Waits until some request has got there."""
        while point not in self._reached:
            await self._changed.wait()

    async def at(self, point: str) -> None:
        self._reached.add(point)
        self._wake()
        while point in self._held:
            await self._changed.wait()
        if point in self.failures:
            raise LegFailed(self.failures[point])

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass
class Script:
    """How the worker behaves; a test may change it at any time."""

    next_token: Callable[[int, int, int], int] = arithmetic
    failure: link_pb2.Failed | None = None  # instead of a first token, of any Run
    fail_after_tokens: int | None = None
    cached_tokens: int = 0
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    may_step: asyncio.Event = field(default_factory=asyncio.Event)  # cleared: no step of any request
    pace_s: float = 0.0  # what a step takes
    max_tokens_sent: int | None = None  # then silence, until may_step is set anew or the request is cancelled
    points: Points = field(default_factory=Points)
    reserve_failure: link_pb2.Failed | None = None  # instead of a Target: `overloaded()`
    reserve_queue_ms: float = 0.0  # what it says that a reservation waited
    num_blocks_held: int = 0  # of each prompt's start; the last block always moves
    num_grants: int = 2  # with Target; never fewer than blocks_per_chunk
    blocks_per_chunk: int = 1
    are_first_tokens_late: bool = False  # after the last chunk instead of before it

    def __post_init__(self) -> None:
        self.may_step.set()


class Generation:
    """One request's choices, as far as this worker has them: each step gives one more token of each."""

    def __init__(self, run: link_pb2.Run, script: Script, phases: link_pb2.WorkerPhases = PREFILLED):
        """Begins, or continues where `run.resumed` says."""
        begun = {resumed.choice: list(resumed.token_ids) for resumed in run.resumed}
        self._run, self._script, self._phases = run, script, phases
        self._tokens = begun or {choice: [] for choice in range(run.n)}
        self._is_first_step = True

    @classmethod
    def after_first_tokens(cls, run: link_pb2.Run, script: Script, first_tokens: Iterable[int]) -> "Generation":
        """Begins where a handoff's Start says; a choice that its first token ended does not go on."""
        self = cls(run, script, LANDED)
        self._tokens = {
            choice: [token]
            for choice, token in enumerate(first_tokens)
            if not _finish_reason(run, token, num_generated=1)
        }
        return self

    @property
    def is_over(self) -> bool:
        return not self._tokens

    def step(self) -> list[link_pb2.SequenceOutput]:
        outputs = [self._advance(choice) for choice in tuple(self._tokens)]
        self._is_first_step = False
        return outputs

    def _advance(self, choice: int) -> link_pb2.SequenceOutput:
        run, tokens = self._run, self._tokens[choice]
        last = tokens[-1] if tokens else run.prompt_tokens[-1]
        token = self._script.next_token(choice, last, len(run.prompt_tokens) + len(tokens))
        tokens.append(token)
        output = link_pb2.SequenceOutput(
            request_id=run.request_id,
            choice=choice,
            token_ids=[token],
            cached_tokens=self._script.cached_tokens,
            cached_by_tier=self._script.cached_by_tier,
        )
        if run.HasField("logprobs"):
            output.logprobs.append(_logprobs(token, run.logprobs))
        output.finish_reason = _finish_reason(run, token, num_generated=len(tokens))
        if self._is_first_step or output.finish_reason:
            output.phases.CopyFrom(self._phases)
        if output.finish_reason:
            output.phases.decode_ms = DECODE_MS
            del self._tokens[choice]
        return output


def _finish_reason(run: link_pb2.Run, token: int, *, num_generated: int) -> inference_pb2.FinishReason:
    if token in run.stop_token_ids and num_generated > run.min_tokens:
        return inference_pb2.FINISH_REASON_STOP
    if num_generated == run.max_tokens:
        return inference_pb2.FINISH_REASON_LENGTH
    return inference_pb2.FINISH_REASON_UNSPECIFIED


def _logprobs(token: int, num_top: int) -> inference_pb2.PositionLogprobs:
    chosen = inference_pb2.TokenLogprob(token_id=token, logprob=-0.5)
    others = [inference_pb2.TokenLogprob(token_id=(token + i) % 256, logprob=-1.0 - i) for i in range(1, num_top)]
    return inference_pb2.PositionLogprobs(chosen=chosen, top=[chosen, *others][:num_top])
