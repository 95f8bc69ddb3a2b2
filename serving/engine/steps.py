"""Steps: everything the device is ever told, as plain integers, and the KV of blocks that come from elsewhere.

A `Step` is a kind, a bucket and one packed int32 array, so it costs one transfer to launch and could cross a socket.
Every partition has a row of that array, in which slots and blocks are counted as the partition counts them. The layouts
here say what lies where in a row, and what a field holds where a step asks for nothing; `blank` runs on the host with
numpy, `unpack` inside the jitted program. Which step comes next is the scheduler's business, what a program computes is
`compiled.bodies`'.
"""

import bisect
import enum
import itertools
import math
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from moonshard.kv.blocks import PLAIN, BlockGroups
from moonshard.serving.control.request import MAX_LOGIT_BIAS, MAX_STOP_TOKENS
from moonshard.serving.control.sampling_parameters import PARAMETERS, Parameter

SCORED_AT_ONCE = 64  # at most: of 163,840 tokens their logits are 42 MB
NOWHERE = 2**31 - 1  # beyond every array: what is written there is dropped


class StepKind(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"  # a decode whose rows go on by tokens that were guessed to follow
    LOAD = "load"
    COPY = "copy"
    EXPORT = "export"
    LAND = "land"
    # never steps of their own: launches behind one that computes logits
    DRAW = "draw"
    ACCEPT = "accept"  # the draws of a verification
    NOTE = "note"  # the last stage's draws come to the first
    SCORE = "score"  # log-probabilities of a prefill's prompts
    # of a draft model, behind everything else of such a step: it reads what the target left, and guesses on from there
    GUESS_PREFILL = "guess_prefill"
    GUESS_DECODE = "guess_decode"
    GUESS_VERIFY = "guess_verify"


class DrawMasks(Protocol):
    """Which tokens the rows of a step's draws may draw, known only once the forward pass runs."""

    def __call__(self) -> np.ndarray:
        """[partitions x slots, words] uint32: bit t % 32 of word t // 32 says whether token t may be drawn.

        Of a verification [partitions x positions x slots, words].
        """
        ...

    def tell(self, tokens: np.ndarray, num_emitted: np.ndarray) -> None:
        """What the step drew, in its plan's order: [sequences, positions], and how many of each are the sequence's."""
        ...


GUESS_AFTER = {
    StepKind.PREFILL: StepKind.GUESS_PREFILL,
    StepKind.DECODE: StepKind.GUESS_DECODE,
    StepKind.VERIFY: StepKind.GUESS_VERIFY,
}  # the kinds behind which a draft model guesses; the buckets are theirs
STEP_BEFORE = {guess: step for step, guess in GUESS_AFTER.items()}

type ProgramKey = tuple[StepKind, int]  # a kind and its bucket; 0 for the kinds that have a single size


@dataclass(frozen=True, slots=True)
class Step:
    """One device launch.

    The device may read `payload` where it lies, until the step is done: nobody writes to it after the step was made.
    """

    number: int
    kind: StepKind
    bucket: int  # per partition: padded tokens, rows, or blocks; 0 for the kinds that have a single size
    metadata: np.ndarray  # [partitions, size of the layout], int32
    sampling: np.ndarray | None = None  # likewise of the draws' layout; None where nobody draws
    allowed: DrawMasks | None = None  # None: any token
    scoring: np.ndarray | None = None  # likewise of the scores' layout; None where no prompt is scored
    scored: tuple[slice, ...] = ()  # of each scored chunk, in the plan's order: its rows among all partitions' tokens
    guessing: np.ndarray | None = None  # likewise of the guesses' layout; None where no model guesses
    num_ahead: int = 0  # tokens that it guesses behind each of the draws
    draws: tuple[int, ...] = ()  # rows of the plan's tokens, in its order; row r of partition p is p * slots + r
    partition: int = 0  # whose blocks an export or a land moves
    num_blocks: int = 0  # of an export or a land; the rest of the bucket is padding
    payload: np.ndarray | None = None  # land only: [bucket, layers, block_size, features] in the pages' dtype
    ticket: int | None = None  # of an export or a land: what others that take part in it call its blocks


@dataclass(frozen=True, slots=True)
class Field:
    """A named array in a packed layout. Floats and unsigned integers travel as their bits."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "int32"
    neutral: float = 0  # its value where nothing is asked for: nobody pays for it and nothing is touched

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class StepLayout:
    """Fields one after another in one int32 array. Immutable; where each field lies is worked out once."""

    def __init__(self, fields: tuple[Field, ...]):
        self.fields = fields
        ends = list(itertools.accumulate(field.size for field in fields))
        self.size = ends[-1]
        self._places = tuple((field, end - field.size, end) for field, end in zip(fields, ends, strict=True))
        self._neutral = np.zeros(self.size, np.int32)
        for field, view in zip(fields, self.views(self._neutral[None]).values(), strict=True):
            view[...] = field.neutral

    def blank(self, num_partitions: int = 1) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The packed array of a step that touches nothing, and a writable view [partitions, ...] of each field."""
        packed = np.tile(self._neutral, (num_partitions, 1))
        return packed, self.views(packed)

    def unpack(self, packed: jax.Array) -> dict[str, jax.Array]:
        """The fields of one partition's row."""
        return {
            field.name: jax.lax.bitcast_convert_type(packed[start:end].reshape(field.shape), jnp.dtype(field.dtype))
            for field, start, end in self._places
        }

    def views(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        """A view [partitions, ...] of each field of a packed array."""
        return {
            field.name: packed[:, start:end].view(field.dtype).reshape(len(packed), *field.shape)
            for field, start, end in self._places
        }


_BY_EFFORT = (
    StepKind.PREFILL,
    StepKind.DECODE,
    StepKind.VERIFY,
    StepKind.DRAW,
    StepKind.ACCEPT,
    StepKind.SCORE,
    *GUESS_AFTER.values(),
    StepKind.EXPORT,
    StepKind.LAND,
    StepKind.LOAD,
    StepKind.COPY,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShapes:
    """The static sizes of a worker's programs. Buckets are per partition: each has as many rows of its own."""

    num_partitions: int = 1
    slots_per_partition: int
    columns_per_sequence: int  # of a block table: a block of each group
    groups: BlockGroups = PLAIN
    max_context_tokens: int
    q_tile: int  # queries per row of a prefill, at most: a row belongs to one sequence
    q_len: int = 1  # positions per row of a verification; 1: there is none
    num_ahead: int = 0  # tokens that a draft model guesses after each step, at most; 0: there is no such model
    prefill_buckets: tuple[int, ...]  # padded tokens, ascending: multiples of q_tile, or of one row that is shorter
    decode_buckets: tuple[int, ...]  # rows, ascending to slots_per_partition; empty for a worker that only prefills
    transfer_buckets: tuple[int, ...] = ()  # blocks, ascending; none where no KV comes or goes

    @property
    def buckets(self) -> dict[StepKind, tuple[int, ...]]:
        """The buckets of the kinds that have several sizes, ascending."""
        found = {StepKind.DECODE: self.decode_buckets, StepKind.PREFILL: self.prefill_buckets}
        if self.q_len > 1:
            found[StepKind.VERIFY] = self.decode_buckets
        found |= dict.fromkeys((StepKind.EXPORT, StepKind.LAND), self.transfer_buckets)
        found[StepKind.SCORE] = self.score_buckets
        if self.num_ahead:
            found |= {guess: found[kind] for kind, guess in GUESS_AFTER.items() if kind in found}
        return {kind: sizes for kind, sizes in found.items() if sizes}

    @property
    def score_buckets(self) -> tuple[int, ...]:
        """Of the prefills whose prompts can be scored: one row and the largest, since few requests ask for it."""
        sizes = (self.q_tile, *self.prefill_buckets[-1:])
        return tuple(bucket for bucket in self.prefill_buckets if bucket in sizes)

    @property
    def programs(self) -> tuple[ProgramKey, ...]:
        """Every (kind, bucket) there is: prefills, which take longest to compile, decodes, draws, scores, then trifles.

        Of each kind the largest first.
        """
        single = {StepKind.DRAW, StepKind.LOAD, StepKind.COPY} | ({StepKind.ACCEPT} if self.q_len > 1 else set())
        sizes = self.buckets | dict.fromkeys(single, (0,))
        kinds = sorted(sizes, key=_BY_EFFORT.index)
        return tuple((kind, size) for kind in kinds for size in reversed(sizes[kind]))

    def layout(self, kind: StepKind, bucket: int = 0) -> StepLayout:
        """Computes a layout; whoever packs every step keeps the result."""
        match kind:
            case StepKind.PREFILL:
                return self._prefill(bucket)
            case StepKind.DECODE:
                return StepLayout(self._decode(bucket))
            case StepKind.VERIFY:
                return StepLayout((*self._decode(bucket), *self._guessed("", bucket)))
            case StepKind.LOAD:
                return self._load()
            case StepKind.COPY:
                return self._copy()
            case StepKind.EXPORT:
                return StepLayout((Field("source", (bucket,)),))
            case StepKind.LAND:
                return StepLayout((Field("destination", (bucket,), neutral=NOWHERE),))
            case StepKind.DRAW | StepKind.NOTE:
                return StepLayout(self._draw())
            case StepKind.ACCEPT:
                return StepLayout((*self._draw(), *self._guessed("sample_", self.slots_per_partition)))
            case StepKind.SCORE:
                return self._score(bucket)
            case StepKind.GUESS_PREFILL:
                following = Field("following", self.layout(StepKind.PREFILL, bucket).fields[0].shape)
                return StepLayout((*self._guess(self.slots_per_partition), following))
            case StepKind.GUESS_DECODE | StepKind.GUESS_VERIFY:
                return StepLayout(self._guess(bucket))

    def _guess(self, rows: int) -> tuple[Field, ...]:
        return (
            Field("num_ahead", ()),  # how many are wanted; equal in all partitions
            Field("num_blocks", (rows,)),  # of each sequence's table, beyond which nothing is written; 0: no guesses
        )

    def prefill_tile(self, bucket: int) -> int:
        """Queries per row of a prefill bucket: the smallest may be less than a whole row."""
        return min(self.q_tile, bucket)

    def _prefill(self, bucket: int) -> StepLayout:
        tile = self.prefill_tile(bucket)
        rows, num_slots = bucket // tile, self.slots_per_partition
        return StepLayout(
            (
                Field("tokens", (rows, tile)),
                Field("positions", (rows, tile), neutral=-1),  # below 0: padding
                self._tables(rows),
                Field("sample_from", (num_slots,)),  # flat index into tokens
            )
        )

    def _decode(self, rows: int) -> tuple[Field, ...]:
        return (
            Field("slot", (rows,), neutral=self.slots_per_partition),  # slots_per_partition: padding
            Field("positions", (rows,), neutral=-1),  # of the input token; below 0: padding
            self._tables(rows),
        )

    def _guessed(self, prefix: str, rows: int) -> tuple[Field, ...]:
        """The tokens that are guessed to follow each row's input token, and how many positions that makes."""
        return (
            Field(f"{prefix}draft", (rows, self.q_len - 1)),
            Field(f"{prefix}q_len", (rows,), neutral=1),
        )

    def _tables(self, rows: int) -> Field:
        return Field("block_tables", (rows, len(self.groups), self.columns_per_sequence))

    def _draw(self) -> tuple[Field, ...]:
        """The fields of draws: the same for prefills and decodes of every bucket, so that draws are compiled once."""
        rows = self.slots_per_partition
        return (
            Field("num_rows", ()),  # what lies beyond is not looked at
            Field("sample_slot", (rows,), neutral=rows),  # out of range: draws for nobody
            *(_column(parameter, rows) for parameter in PARAMETERS),
            Field("choice", (rows,)),
            Field("sample_position", (rows,)),  # of the token to be drawn, the first of several
            Field("has_bias", (rows,)),
            Field("stops_from", (rows,)),  # the first position at which stop tokens may be drawn
            Field("wants_logprobs", (rows,)),
            Field("is_masked", (rows,)),
        )

    def score_tile(self, bucket: int) -> int:
        """Rows of a prefill bucket that are scored at once: their logits are all that is there of the vocabulary."""
        return math.gcd(bucket, SCORED_AT_ONCE)

    def _score(self, bucket: int) -> StepLayout:
        return StepLayout(
            (
                Field("num_tiles", ()),  # equal in all partitions, whose devices may have to gather each one's logits
                Field("tiles", (bucket // self.score_tile(bucket),)),
                Field("targets", (bucket,)),  # the token that follows each of the prefill's
            )
        )

    def _load(self) -> StepLayout:
        return StepLayout(
            (
                Field("slot", (), neutral=self.slots_per_partition),
                Field("num_prompt", ()),
                Field("num_history", ()),
                Field("history", (self.max_context_tokens,)),
                Field("bias_ids", (MAX_LOGIT_BIAS,), neutral=NOWHERE),
                Field("bias_values", (MAX_LOGIT_BIAS,), "float32"),
                Field("stop_ids", (MAX_STOP_TOKENS,), neutral=NOWHERE),
            )
        )

    def _copy(self) -> StepLayout:
        return StepLayout(
            (
                Field("source", (self.slots_per_partition,)),
                Field("destination", (self.slots_per_partition,), neutral=NOWHERE),
            )
        )


def _column(parameter: Parameter, rows: int) -> Field:
    """A field as columns of words: 64 bits are two words, the high one first."""
    if parameter.is_wide:
        return Field(parameter.name, (rows, 2), "uint32", neutral=parameter.neutral)
    return Field(parameter.name, (rows,), parameter.dtype, neutral=parameter.neutral)


def smallest(buckets: tuple[int, ...], size: int) -> int:
    """The smallest bucket that holds `size`; `buckets` are ascending. IndexError where none does."""
    return buckets[bisect.bisect_left(buckets, size)]
