"""The scheduler's mutable records: an accepted request, its sequences, and each sequence's occupancy in a slot.

Three types, because their lives differ. A request is accepted once; a sequence lives as long as its choice and knows
what was generated; an occupancy lasts from admission to release, and a preempted sequence has several. A step in flight
refers to the occupancy, so that its result can never reach a later occupant of the slot. Lengths are computed from
these and not stored a second time. Every decision is the scheduler's.
"""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, field

from moonshard.kv.prefix import BlockName, block_names
from moonshard.serving.control.drafting.drafter import Drafter
from moonshard.serving.control.plan import DecodeRow, LoadPlan, PrefillChunk
from moonshard.serving.control.request import FinishReason, Request, SequenceId, SlotId


def finish_reason(request: Request, token: int, num_generated: int) -> FinishReason | None:
    """Whether `token` ends a choice, as its `num_generated`-th. A stop token is part of the output."""
    if token in request.stop_token_ids and num_generated > request.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_generated >= request.max_tokens else None


@dataclass(eq=False, kw_only=True, slots=True)
class Accepted:
    """A request that has not ended, made with the choices that go on and the tokens each of them has already."""

    request: Request
    arrival: int  # counts accepted requests
    is_resumed: bool = False  # it began in another worker, and none of its choices waits for another
    generated: InitVar[Mapping[int, tuple[int, ...]]]
    choices: tuple["Sequence", ...] = field(init=False)
    num_live: int = field(init=False)  # choices without a finish reason
    num_known_tokens: int = field(default=0, init=False)  # of the prompt, in the cache when it came
    to_fork: list["Sequence"] = field(init=False)  # choices in no line: they enter with the leader, or come back

    def __post_init__(self, generated: Mapping[int, tuple[int, ...]]) -> None:
        self.choices = tuple(
            Sequence(id=SequenceId(self.request.id, choice), accepted=self, generated=list(tokens))
            for choice, tokens in generated.items()
        )
        self.num_live = len(self.choices)
        self.to_fork = [] if self.is_resumed else list(self.choices[1:])

    @property
    def leader(self) -> "Sequence":
        """The choice for which the others wait."""
        return self.choices[0]


@dataclass(eq=False, kw_only=True, slots=True)
class Sequence:
    """One choice: the tokens known so far."""

    id: SequenceId
    accepted: Accepted
    generated: list[int] = field(default_factory=list[int])
    num_cached_tokens: int | None = None  # when it was first admitted; None before
    drafter: Drafter | None = None  # that guesses its next tokens
    _names: list[BlockName] = field(default_factory=list[BlockName])

    @property
    def request(self) -> Request:
        return self.accepted.request

    @property
    def is_scored(self) -> bool:
        """Whether its prefill gives the prompt's log-probabilities: the first choice's, once."""
        return self.request.num_prompt_logprobs is not None and self.id.choice == 0 and not self.generated

    @property
    def order(self) -> tuple[int, bool, int, int]:
        """Sorts by priority, then by arrival; the first is never preempted for another. Of one priority, resumed
        requests sort before all that began here.
        """
        accepted = self.accepted
        return accepted.request.priority, not accepted.is_resumed, accepted.arrival, self.id.choice

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + len(self.generated)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Known tokens at positions [start, end), without building the whole."""
        num_prompt = len(self.request.prompt)
        generated = self.generated[max(0, start - num_prompt) : max(0, end - num_prompt)]
        return self.request.prompt[start:end] + tuple(generated)

    def names(self, num_blocks: int, block_size: int) -> list[BlockName]:
        """The names of the first `num_blocks` blocks, all of whose tokens are known."""
        if not self._names:
            self._names += self.request.block_names
        num_named = len(self._names)
        if num_named < num_blocks:
            parent = self._names[-1] if self._names else self.request.prefix_root
            rest = self.tokens(num_named * block_size, num_blocks * block_size)
            self._names += block_names(parent, rest, block_size)
        return self._names[:num_blocks]

    def append(self, tokens: tuple[int, ...]) -> tuple[int, FinishReason | None]:
        """Take tokens up to the one that ends the choice; how many were taken, and why it ended if it did."""
        for num_taken, token in enumerate(tokens, start=1):
            self.generated.append(token)
            if (finish := finish_reason(self.request, token, len(self.generated))) is not None:
                return num_taken, finish
        return len(tokens), None


class Phase(enum.Enum):
    """Where an occupancy stands. The last two schedule nothing more and leave when nothing of theirs is in flight."""

    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    ENDED = "ended"


@dataclass(eq=False, kw_only=True, slots=True)
class Occupancy:
    """A sequence in a slot, with the blocks it holds."""

    sequence: Sequence
    slot: SlotId
    blocks: tuple[int, ...]
    phase: Phase = Phase.PREFILL
    num_computed: int = 0  # tokens whose KV is written once every launched step has run, `num_unsure` of them perhaps
    num_pending: int = 0  # tokens that launched steps draw, at most, and the host has not seen
    num_unsure: int = 0  # of the pending ones, those that may not come
    num_in_flight: int = 0  # launched steps that use the slot or the blocks
    num_noted: int = 0  # blocks whose names the cache was told

    @property
    def is_running(self) -> bool:
        return self.phase is Phase.PREFILL or self.phase is Phase.DECODE

    @property
    def is_exhausted(self) -> bool:
        """Whether launched steps draw the last token that may be drawn, whatever they give."""
        return self.num_undrawn + self.num_unsure <= 0

    @property
    def num_undrawn(self) -> int:
        """How many tokens may still be drawn after those that launched steps draw."""
        return self.sequence.request.max_tokens - len(self.sequence.generated) - self.num_pending

    @property
    def num_left(self) -> int:
        """Known tokens whose KV no launched step writes."""
        return self.sequence.num_tokens - self.num_computed

    @property
    def can_decode(self) -> bool:
        """Whether there is a next token to draw and its position is known."""
        return self.phase is Phase.DECODE and not self.is_awaited and self.num_undrawn > 0

    @property
    def may_go_on(self) -> bool:
        """Whether the result of a launched step is needed to tell if there is a next token to draw, and where."""
        return self.phase is Phase.DECODE and self.is_awaited and self.num_undrawn > 0

    @property
    def is_awaited(self) -> bool:
        """Whether its next row is made only once the results of all its launched steps are known: they say where it
        begins, or its guesses follow from them.
        """
        if self.num_unsure:
            return True
        return self.num_pending > 0 and self.is_eager

    @property
    def is_eager(self) -> bool:
        """Whether its rows are to guess."""
        drafter = self.sequence.drafter
        return drafter is not None and drafter.is_eager

    @property
    def num_right(self) -> float:
        """Right guesses that its next row may expect."""
        drafter = self.sequence.drafter
        return 0.0 if drafter is None else drafter.num_right

    @property
    def num_ahead(self) -> int:
        """How many tokens a draft model is to guess behind the row that it launches now."""
        drafter = self.sequence.drafter
        return 0 if drafter is None else drafter.num_ahead

    @property
    def is_draining(self) -> bool:
        """Whether its blocks come back without anything more being launched."""
        return not self.is_running or (self.phase is Phase.DECODE and self.is_exhausted)

    @property
    def num_complete_tokens(self) -> int:
        """How many leading tokens are known to the host and have their KV written once every launched step has run."""
        return min(self.num_computed - self.num_unsure, self.sequence.num_tokens)

    def load(self, number: int) -> LoadPlan:
        sequence = self.sequence
        history = sequence.tokens(0, sequence.num_tokens)
        return LoadPlan(number=number, sequence=sequence.id, request=sequence.request, slot=self.slot, history=history)

    def chunk(self, end: int, samplers: "list[Occupancy]") -> PrefillChunk:
        """The chunk of the prompt from what is computed up to position `end`. `samplers` draw their next token from its
        last logits.
        """
        return PrefillChunk(
            sequence=self.sequence.id,
            request=self.sequence.request,
            slot=self.slot,
            start=self.num_computed,
            tokens=self.sequence.tokens(self.num_computed, end),
            block_table=self.blocks,
            samples=tuple((sampler.sequence.id, sampler.slot) for sampler in samplers),
            next_token=None if samplers else self.sequence.tokens(end, end + 1)[0],
            is_scored=self.sequence.is_scored,
        )

    def row(self, q_len: int, draft: tuple[int, ...] = ()) -> DecodeRow:
        sequence = self.sequence
        return DecodeRow(
            sequence.id, sequence.accepted.request, self.slot, self.num_computed, self.blocks, q_len, draft
        )


def active_tokens(occupancies: Iterable[Occupancy]) -> int:
    """How many tokens they have, counting the most that launched steps may add."""
    return sum([occupancy.sequence.num_tokens + occupancy.num_pending for occupancy in occupancies])
