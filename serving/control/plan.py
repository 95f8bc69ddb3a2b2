"""What the scheduler asks of the device: one plan per launch, and what comes back.

Plans are immutable and name everything a step needs; the device side never looks into the scheduler. They are launched
in the order of their numbers, which count from 0 without a gap, and complete in that order. Padding, buckets and the
packing of metadata are `engine.encoder`'s.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from moonshard.serving.control.request import Logprobs, Output, Request, SequenceId, SlotId


def needs_slot_state(request: Request) -> bool:
    """Whether a slot must be loaded for this request: counts of past tokens, a bias, or stop tokens held back.

    A slot that was not loaded still holds the state of whoever used it before; the device applies that state only to
    rows whose request needs it.
    """
    holds_back_stops = request.min_tokens > 0 and bool(request.stop_token_ids)
    return request.sampling.needs_history or bool(request.sampling.logit_bias) or holds_back_stops


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPlan:
    """Fill a slot's device state, before the first step that samples into it. Gives no tokens.

    The last token of the history becomes the slot's input token, as if it had been sampled there: a sequence whose KV
    came from elsewhere decodes from it, a prefill samples over it.
    """

    number: int
    sequence: SequenceId
    request: Request
    slot: SlotId
    history: tuple[int, ...]  # the prompt, then what was generated elsewhere or before a preemption

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillChunk:
    """Tokens of one sequence at positions `start, start + 1, ...`, whose KV is computed and written.

    `block_table` has the sequence's blocks, of all KV groups, as `kv.blocks.BlockGroups` orders them.

    `samples` is empty before the last chunk. On the last it names each sequence that draws its next token, at position
    `start + len(tokens)`, from the last token's logits: this one first, then those forked from it.
    """

    sequence: SequenceId
    request: Request
    slot: SlotId
    start: int
    tokens: tuple[int, ...]
    block_table: tuple[int, ...]
    samples: tuple[tuple[SequenceId, SlotId], ...]
    next_token: int | None = None  # that follows these; None: `samples` draw it
    is_scored: bool = False  # log-probabilities of the prompt's tokens that follow these are wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillPlan:
    number: int
    chunks: tuple[PrefillChunk, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyPlan:
    """Copy whole blocks on the device, (partition, source, destination). Gives no tokens."""

    number: int
    pairs: tuple[tuple[int, int, int], ...]


class DecodeRow(NamedTuple):
    """The next tokens of one sequence. The input token is the last sampled or loaded into the slot; the host may not
    know it.

    `position` is the input token's: as many tokens precede it in the blocks. KV is written at `q_len` positions from
    there on, the input token's and those of the `q_len - 1` tokens that were guessed to follow it; the step emits at
    most `q_len` tokens, the first of them at `position + 1`. Of what was written, what the emitted tokens do not
    confirm means nothing: the next row of the sequence begins behind the last but one of its tokens, and writes there
    again.
    """

    sequence: SequenceId
    request: Request
    slot: SlotId
    position: int
    block_table: tuple[int, ...]
    q_len: int = 1
    draft: tuple[int, ...] = ()  # the tokens that were guessed to follow, `q_len - 1`


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodePlan:
    number: int
    rows: tuple[DecodeRow, ...]
    num_ahead: int = 0  # tokens that a draft model is to guess behind each row, where there is one
    is_guessing: bool = False  # its rows were to guess, whether they found anything or not

    @property
    def has_guesses(self) -> bool:
        return any(row.q_len > 1 for row in self.rows)


type Plan = LoadPlan | PrefillPlan | CopyPlan | DecodePlan


class Sampled(NamedTuple):
    """The tokens that a step emitted for one sequence, in order: one from a prefill, at most `q_len` from a row.

    `logprobs` has one for each of them, or is empty. `guesses` are what a draft model takes to follow them.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    guesses: tuple[int, ...] = ()


type Results = Mapping[SequenceId, Sampled]


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivered:
    """What the completion of a step means to clients."""

    outputs: tuple[Output, ...] = ()
    ended: tuple[bytes, ...] = ()  # requests whose last choice finished
