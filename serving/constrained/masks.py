"""Which tokens constrained sequences may draw next, as bits, computed beside the step that draws them.

The forward pass of a step needs no mask: only its draw does. So a step with constrained rows is scheduled and launched
ahead as any other. While the device computes its logits, the tokens of the step before arrive, each sequence moves on
in its grammar, and the masks are computed; the draw is launched behind them. `LateMasks` goes with such a step: the
device thread calls it between the two, and the thread that fetches tokens tells it what was drawn.

A sequence's place in its grammar follows from its tokens alone. One that was preempted keeps its place; one that comes
from elsewhere begins with the tokens it has. What is drawn for a sequence that has ended meanwhile means nothing.
"""

import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from moonshard.serving.constrained.grammars import GrammarError, shortened
from moonshard.serving.control.plan import DecodePlan, Plan, PrefillPlan
from moonshard.serving.control.request import Request, SequenceId

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from moonshard.serving.constrained.grammars import Grammars

ANY_TOKEN = 0xFFFFFFFF  # a word of a mask
MAX_THREADS = 4
FEW = 2  # rows, that are not worth waking threads for


class Closed(Exception):
    """The engine has ended, and nobody will tell what was drawn."""


@final
class Place:
    """A sequence's place in its grammar. Tokens are told on one thread, and followed on the device's."""

    def __init__(self, grammar: str, matcher: "LLMatcher", tokens: Iterable[int] = ()):
        self.grammar = grammar
        self.matcher = matcher
        self.tokens = list(tokens)  # that are known
        self.is_over = False  # an end token was drawn, behind which there is no grammar
        self.fault: str | None = None
        self._num_followed = 0

    @property
    def is_open(self) -> bool:
        """Whether the grammar says what comes next."""
        return not self.is_over and self.fault is None

    def look_ahead(self, draft: Sequence[int], masks: np.ndarray, grammars: "Grammars") -> None:
        """Writes what may follow each guess into `masks` [guesses, words], and stays where it is.

        A matcher that fails on the way has nothing to go back to: the next mask finds its error.
        """
        num_ahead = 0
        for token, line in zip(draft, masks, strict=False):
            if token in grammars.end_ids:
                masks[num_ahead:] = grammars.end_mask
                break
            if not self.matcher.try_consume_tokens([token]):
                break
            num_ahead += 1
            self.matcher.unsafe_compute_mask_ptr(line.ctypes.data, line.nbytes)
        if num_ahead and not self.matcher.is_error():
            self.matcher.rollback(num_ahead)

    def follow(self, num_tokens: int, end_ids: Collection[int]) -> None:
        """Moves on to behind the first `num_tokens` tokens."""
        tokens = self.tokens[self._num_followed : num_tokens]
        self._num_followed = num_tokens
        for token in tokens:
            if not self.is_open:
                return
            if not self.matcher.consume_token(token):
                self.fault = shortened(self.matcher.get_error())
            self.is_over = token in end_ids


class Row(NamedTuple):
    """One row of a step's draws that is constrained."""

    sequence: SequenceId
    place: Place
    draw: int  # which of the step's draws it is: its row of the masks
    number: int  # of the step's sequences, as the plan names them
    num_tokens: int  # that its sequence has generated before
    draft: tuple[int, ...] = ()  # that is guessed to follow


@final
class LateMasks:
    """The masks of one step."""

    def __init__(self, rows: Sequence[Row], masks: "Masks", q_len: int = 1):
        """`q_len`: positions of each row."""
        self._rows = rows
        self._masks = masks
        self._q_len = q_len
        self.faults: Mapping[SequenceId, Place] = {}  # sequences that cannot go on: their draws mean nothing

    def __call__(self) -> np.ndarray:
        """[draws, words] uint32; bit t % 32 of word t // 32 says whether token t may be drawn.

        Of a step with guesses [partitions x positions x slots, words], each as if the guesses before it were right.
        Waits for the tokens that were drawn before. Raises Closed.
        """
        found = self._masks.compute(self._rows, self._q_len)
        self.faults = {row.sequence: row.place for row in self._rows if row.place.fault is not None}
        return found

    def tell(self, tokens: np.ndarray, num_emitted: np.ndarray) -> None:
        """What the step drew: [sequences, positions], and how many of each are the sequence's."""
        self._masks.tell(self._rows, tokens, num_emitted)


@final
class Masks:
    """The places of an engine's constrained sequences. On its event loop, but for `compute` and `tell`."""

    def __init__(self, grammars: "Callable[[], Grammars]", num_draws: int, num_partitions: int = 1, q_len: int = 1):
        """`num_draws`: rows of a step's draws, of all partitions; of a step with guesses each has `q_len` positions.
        `grammars` is first called when there is a sequence.
        """
        self._grammars = grammars
        self._num_draws = num_draws
        self._num_partitions = num_partitions
        self._q_len = q_len
        self._places: dict[bytes, dict[int, Place]] = {}  # by request and choice
        self._told = threading.Condition()
        self._is_closed = False
        self._executor: LLExecutor | None = None

    def places(self, grammar: str, generated: Mapping[int, tuple[int, ...]]) -> Mapping[int, Place]:
        """The places of a request's choices, each behind the tokens that it has.

        Raises GrammarError; takes long where the grammar was not compiled before.
        """
        grammars = self._grammars()
        return {choice: Place(grammar, grammars.matcher(grammar), tokens) for choice, tokens in generated.items()}

    def take(self, request_id: bytes, places: Mapping[int, Place]) -> None:
        """From now on the request's choices are in these places."""
        if places:
            self._places[request_id] = dict(places)

    def end(self, sequence: SequenceId) -> None:
        """A choice has ended. Steps in flight keep what they need."""
        if (places := self._places.get(sequence.request_id)) is not None:
            places.pop(sequence.choice, None)

    def forget(self, request_id: bytes) -> None:
        """A request has ended: likewise."""
        self._places.pop(request_id, None)

    def has(self, sequence: SequenceId, place: Place) -> bool:
        """Whether a sequence that goes on is in this place."""
        return self._places.get(sequence.request_id, {}).get(sequence.choice) is place

    def late(self, plan: Plan, draws: Sequence[int]) -> LateMasks | None:
        """The masks of a step whose sequences have these rows of its draws; None where none is constrained.

        A sequence whose request has been forgotten may draw anything: nobody is told.
        """
        if not self._places:
            return None
        rows = list[Row]()
        for index, ((sequence, request, position, draft), draw) in enumerate(
            zip(_drawn_for(plan), draws, strict=False)
        ):
            place = self._places.get(request.id, {}).get(sequence.choice) if request.grammar else None
            if place is not None:
                rows.append(Row(sequence, place, draw, index, position - len(request.prompt), draft))
        has_guesses = isinstance(plan, DecodePlan) and plan.has_guesses
        return LateMasks(rows, self, self._q_len if has_guesses else 1) if rows else None

    def forced(self, sequence: SequenceId, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """The tokens that the grammar alone lets follow a sequence's, as far as they are certain; at most so many.

        For a sequence with nothing in flight, whose place nobody else moves.
        """
        place = self._places.get(sequence.request_id, {}).get(sequence.choice)
        if place is None or len(place.tokens) != len(tokens):
            return ()
        place.follow(len(tokens), self._grammars().end_ids)
        is_sound = place.is_open and not place.matcher.is_error()
        return tuple(place.matcher.compute_ff_tokens()[:most]) if is_sound else ()

    def close(self) -> None:
        """Whoever waits for tokens gets Closed."""
        with self._told:
            self._is_closed = True
            self._told.notify_all()

    # ---- on other threads

    def tell(self, rows: Sequence[Row], tokens: np.ndarray, num_emitted: np.ndarray) -> None:
        with self._told:
            for row in rows:
                row.place.tokens += tokens[row.number, : num_emitted[row.number]].tolist()
            self._told.notify_all()

    def compute(self, rows: Sequence[Row], q_len: int = 1) -> np.ndarray:
        with self._told:
            self._told.wait_for(lambda: self._is_closed or all(len(row.place.tokens) >= row.num_tokens for row in rows))
            if self._is_closed:
                raise Closed
        grammars = self._grammars()
        for row in rows:
            row.place.follow(row.num_tokens, grammars.end_ids)
        found = np.full((self._num_draws, grammars.num_mask_words), ANY_TOKEN, np.uint32)
        self._fill(found, [row for row in rows if row.place.is_open])
        for row in rows:
            grammars.used(row.place.grammar, 1 + len(row.draft))
            if row.place.is_over:
                found[row.draw] = grammars.end_mask
            elif row.place.is_open and row.place.matcher.is_error():
                row.place.fault = shortened(row.place.matcher.get_error())
            if row.place.fault is not None:
                grammars.drop(row.place.grammar)
                found[row.draw] = ANY_TOKEN
        return self._behind_guesses(found, rows, grammars, q_len) if q_len > 1 else found

    def _behind_guesses(self, first: np.ndarray, rows: Sequence[Row], grammars: "Grammars", q_len: int) -> np.ndarray:
        """The masks of all positions, of which the first ones are given.

        Behind a guess that its grammar does not allow no row goes on, and the masks do not matter.
        """
        slots = self._num_draws // self._num_partitions
        every = np.full((self._num_partitions, q_len, slots, first.shape[1]), ANY_TOKEN, np.uint32)
        every[:, 0] = first.reshape(self._num_partitions, slots, -1)
        for row in rows:
            partition, slot = divmod(row.draw, slots)
            masks = every[partition, 1:, slot]
            if row.place.is_over:
                masks[:] = grammars.end_mask
            elif row.place.is_open:
                row.place.look_ahead(row.draft, masks, grammars)
        return every.reshape(-1, first.shape[1])

    def _fill(self, found: np.ndarray, rows: Sequence[Row]) -> None:
        if len(rows) <= FEW:
            for row in rows:
                line = found[row.draw]
                row.place.matcher.unsafe_compute_mask_ptr(line.ctypes.data, line.nbytes)
            return
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))))
        matchers = [(row.place.matcher, row.draw) for row in rows]
        self._executor.unsafe_compute_mask_ptr(matchers, found.ctypes.data, found.strides[0], len(found))


def _drawn_for(plan: Plan) -> Iterable[tuple[SequenceId, Request, int, tuple[int, ...]]]:
    """The sequences that a step draws for, in the plan's order, the position of the token to be drawn, and guesses at
    it and those behind it.
    """
    match plan:
        case DecodePlan(rows=rows):
            return ((row.sequence, row.request, row.position + 1, row.draft) for row in rows)
        case PrefillPlan(chunks=chunks):
            return (
                (sequence, chunk.request, chunk.start + len(chunk.tokens), ())
                for chunk in chunks
                for sequence, _ in chunk.samples
            )
        case _:
            return ()


def no_masks() -> Masks:
    """Of an engine that serves no grammars."""

    def none() -> "Grammars":
        raise GrammarError("this worker serves no grammars")

    return Masks(none, 0)
