"""Which partition of which worker takes a request, or one leg of it, by tokens and by what is known of its prompt.

Pure: no I/O, and time is an argument. A reservation is made at the moment of decision, for every token the request may
come to hold, and released exactly once: counting requests, or counting when a stream begins, sends a burst to one
worker. A worker that reports its queue is believed, and what it has not seen yet is added: so several routers agree.
An affinity key is pinned when its request is sent: what was decided and then refused was served nowhere, and no home
was given it. Until then the key's other requests follow it, as far as a pin is followed.
The caller names the homes to choose among, so roles are not known here. How one of them is chosen is
`routing.policies`'.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from moonshard.serving.control.routing.conversations import Conversations, LastTurn
from moonshard.serving.control.routing.loads import SILENT, Loads
from moonshard.serving.control.routing.names import QUEUE_WEIGHT
from moonshard.serving.control.routing.pins import Pins
from moonshard.serving.control.routing.policies import Candidates, Policy, least_tokens
from moonshard.serving.control.routing.prefix_index import BlockName, PrefixIndex
from moonshard.serving.control.routing.rendezvous import Rendezvous
from moonshard.serving.control.routing.slower import Slower

MAX_FLEETS = 8  # tuples of homes whose numbers are remembered
Affinity = Literal["hit", "miss", "moved"]


@dataclass(frozen=True, slots=True)
class Home:
    """A partition of a worker. A request stays in its partition for as long as the worker serves it."""

    worker: str
    partition: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What the router must know of a request, or of one leg of it."""

    num_tokens: int  # that it may come to hold
    num_prompt: int = 0  # of these, those that have to be computed there, or moved there, unless they are known
    is_prefill: bool = False  # it ends with its prompt, so that what is known there is no work at all
    names: Sequence[BlockName] = ()  # of the prompt's full blocks
    block_size: int = 64
    affinity_key: bytes | None = None  # as `routing.pins.affinity_key` makes it


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """Tokens held against a partition from the decision until the request ends."""

    number: int
    home: Home
    num_tokens: int
    num_prompt: int = 0  # of these
    num_left_tokens: int = 0  # of the prompt, to be computed there: what can be fetched counts at what that costs
    num_known_tokens: int = 0  # of the prompt, that its home has at hand
    num_queued_tokens: int = 0  # there, before it
    affinity: Affinity | None = None  # None: without an affinity key
    affinity_key: bytes | None = None


@dataclass(frozen=True, slots=True)
class _Given:
    """What was given to a home at the decision, so that it can be taken back."""

    decided_s: float
    is_prefill: bool
    turn: LastTurn | None  # None: of a prompt that cannot be told from others
    turn_before: LastTurn | None  # None: the conversation begins


class Router:
    """Counts tokens in flight per partition. Reservations at a worker that is lost end with their requests."""

    def __init__(self, *, queue_weight: float = QUEUE_WEIGHT, pins: Pins | None = None) -> None:
        self.index = PrefixIndex()
        self._queue_weight = queue_weight
        self._pins = Pins() if pins is None else pins
        self._loads = Loads()
        self._rendezvous = Rendezvous()
        self._conversations = (Conversations(), Conversations())  # of legs that decode, and of those that prefill
        self._numbers: dict[Home, int] = {}
        self._of_worker: dict[str, list[int]] = {}  # the numbers of its partitions
        self._reservations: dict[int, Reservation] = {}
        self._unseen: set[int] = set()  # reservations that their workers do not report yet
        self._unsent: dict[int, _Given] = {}  # by reservation, whose request was not sent yet: what its home was given
        self._coming: dict[bytes, Reservation] = {}  # by affinity key: the last of these
        self._next_number = 0
        self._below = Slower()
        self._fleets: deque[tuple[Sequence[Home], np.ndarray]] = deque(maxlen=MAX_FLEETS)

    def home_number(self, home: Home) -> int:
        """The number under which the index and the pins know the home."""
        number = self._numbers.get(home)
        if number is None:
            number = self._numbers[home] = self._loads.append()
            self._rendezvous.place(number, home.worker, home.partition)
            self._of_worker.setdefault(home.worker, []).append(number)
        return number

    def reserve(
        self, homes: Sequence[Home], ask: Ask, *, policy: Policy = least_tokens, now_s: float = 0.0
    ) -> Reservation | None:
        """Choose among `homes`; None when there is none. The numbers of a tuple of homes are looked up only once."""
        if not homes:
            return None
        self._loads.decay(now_s)
        numbers = self._numbers_of(homes)
        known, left = self._known_tokens(numbers, ask)
        pinned = None if ask.affinity_key is None else self._last_home(ask.affinity_key, now_s)
        turn_before = self._go_on(ask)
        candidates = self._candidates(numbers, left, pinned, ask.affinity_key, is_first_turn=turn_before is None)
        row = policy(candidates)
        number, num_known, num_left = int(numbers[row]), int(known[row]), int(left[row])
        reservation = Reservation(
            number=self._next_number,
            home=homes[row],
            num_tokens=ask.num_tokens - ask.num_prompt + num_left if ask.is_prefill else ask.num_tokens,
            num_prompt=ask.num_prompt,
            num_left_tokens=num_left,
            num_known_tokens=num_known,
            num_queued_tokens=int(candidates.queued_tokens[row]),
            affinity=_affinity(ask, pinned, number),
            affinity_key=ask.affinity_key,
        )
        self._take(number, reservation)
        turn = self._give_turn(number, ask)
        self._unsent[reservation.number] = _Given(self._loads.decayed_s, ask.is_prefill, turn, turn_before)
        return reservation

    def sent(self, reservation: Reservation, now_s: float) -> None:
        """The request, or its leg, is on its way there: its affinity key is pinned there from now on."""
        self._unsent.pop(reservation.number, None)
        if reservation.affinity_key is not None:
            self._forget_coming(reservation.affinity_key, reservation)
            self._pins.put(reservation.affinity_key, self._numbers[reservation.home], now_s)

    def nothing_came(self, reservation: Reservation) -> None:
        """The reservation brought no output: the affinity key that was pinned, or was to be pinned, by it is not."""
        number = self._numbers.get(reservation.home)
        if reservation.affinity_key is not None and reservation.affinity != "hit" and number is not None:
            self._pins.drop(reservation.affinity_key, number)

    def process_ended(self, home: Home) -> None:
        """The process of this home has ended: what was pinned there is pinned nowhere."""
        if (number := self._numbers.get(home)) is not None:
            self._pins.end(number)

    def forget(self, worker: str) -> bool:
        """No process will come there again: whatever is kept of its homes is dropped, and others get their numbers.

        Does nothing, and says False, while reservations there are open. Takes a look at all pins and conversations.
        """
        if any(reservation.home.worker == worker for reservation in self._reservations.values()):
            return False
        gone = frozenset(self._of_worker.pop(worker, ()))
        self._numbers = {home: number for home, number in self._numbers.items() if number not in gone}
        self._fleets.clear()
        self._pins.forget(gone)
        self._below.forget(gone)
        for conversations in self._conversations:
            conversations.forget(gone)
        for number, given in self._unsent.items():
            if given.turn_before is not None and given.turn_before.home in gone:
                self._unsent[number] = replace(given, turn_before=None)
        for number in gone:
            self.index.purge(number)
            self._loads.free(number)
        return True

    def seen(self, reservation: Reservation) -> None:
        """From the worker's next report on, that report counts this reservation itself."""
        if reservation.number in self._unseen:
            self._unseen.remove(reservation.number)
            self._loads.unseen[self._numbers[reservation.home]] -= reservation.num_tokens

    def report(self, home: Home, queued_tokens: int) -> None:
        """The tokens that a worker says it has to do there. Reservations that it has not seen are added."""
        self._loads.reported[self.home_number(home)] = queued_tokens

    def silent(self, home: Home) -> None:
        """The home reports no more: only the reservations there are counted."""
        self._loads.reported[self.home_number(home)] = SILENT

    def release(self, reservation: Reservation) -> None:
        """Ends a reservation. KeyError when it was released before."""
        del self._reservations[reservation.number]
        self.seen(reservation)
        number = self._numbers[reservation.home]
        self._loads.in_flight[number] -= reservation.num_tokens
        if (given := self._unsent.pop(reservation.number, None)) is not None:
            self._loads.take_back(number, reservation.num_left_tokens, given.decided_s)
            self._take_back_turn(given)
            if reservation.affinity_key is not None:
                self._forget_coming(reservation.affinity_key, reservation)

    def in_flight_tokens(self, home: Home) -> int:
        """The tokens of the open reservations of a partition."""
        number = self._numbers.get(home)
        return 0 if number is None else int(self._loads.in_flight[number])

    def queued_tokens(self, home: Home) -> int:
        """The tokens that a request sent there now would find before it."""
        return int(self._loads.queued(np.array([self.home_number(home)]))[0])

    def fetches(self, homes: Sequence[Home], own: Home, shared: Home, own_share: float, shared_share: float) -> None:
        """A worker has tiers below its device's pages: the index knows what is in its own under `own`, and what is in
        one that all workers read under `shared`. Fetching a block takes such a share of the time that computing it
        takes.
        """
        numbers = [self.home_number(home) for home in homes]
        self._below.set(numbers, self.home_number(own), self.home_number(shared), own_share, shared_share)

    def num_known_blocks(self, home: Home) -> int:
        return self.index.num_names(self.home_number(home))

    def worker_tokens(self, worker: str) -> int:
        """The tokens of the open reservations of all partitions of a worker."""
        return sum(int(self._loads.in_flight[number]) for number in self._of_worker.get(worker, ()))

    def queues(self, homes: Sequence[Home]) -> np.ndarray:
        """[n] of `homes`: the `queued_tokens` of each, computed at once."""
        return self._loads.queued(self._numbers_of(homes))

    def _last_home(self, key: bytes, now_s: float) -> int | None:
        """The home where a request of the key is about to be sent, or else was sent last."""
        coming = self._coming.get(key)
        return self._pins.find(key, now_s) if coming is None else self._numbers[coming.home]

    def _forget_coming(self, key: bytes, reservation: Reservation) -> None:
        """The reservation was sent or given up, so the key's other requests no longer follow it. If a later one is on
        its way, they follow that.
        """
        if self._coming.get(key) is reservation:
            del self._coming[key]

    def _numbers_of(self, homes: Sequence[Home]) -> np.ndarray:
        """[n] int64, kept by tuple: hashing a thousand homes takes longer than the rest of a decision."""
        for fleet, numbers in self._fleets:
            if fleet is homes:
                return numbers
        numbers = np.array([self.home_number(home) for home in homes], np.int64)
        if isinstance(homes, tuple):  # which stays as it is
            self._fleets.append((homes, numbers))
        return numbers

    def _known_tokens(self, numbers: np.ndarray, ask: Ask) -> tuple[np.ndarray, np.ndarray]:
        """[n] and [n]: how many tokens of the prompt each home knows, and how many are left to be computed there, where
        what it can fetch counts as much as fetching takes. The last token is always left.
        """
        found = self.index.num_known(ask.names) if ask.names else {}
        if not found:
            return np.zeros(len(numbers), np.int64), np.full(len(numbers), ask.num_prompt, np.int64)
        known_at = np.zeros(len(self._loads), np.int64)
        known_at[list(found)] = list(found.values())
        known = known_at[numbers]
        saved = known + self._below.saved(numbers, known, known_at)
        most = ask.num_prompt - 1
        left = ask.num_prompt - np.minimum((saved * ask.block_size).astype(np.int64), most)
        return np.minimum(known * ask.block_size, most), left

    def _candidates(
        self, numbers: np.ndarray, left: np.ndarray, pinned: int | None, key: bytes | None, *, is_first_turn: bool
    ) -> Candidates:
        return Candidates(
            left_tokens=left,
            queued_tokens=self._loads.queued(numbers),
            recent_tokens=self._loads.recent[numbers],
            conversations=self._loads.conversations[numbers],
            total_tokens=self._loads.total[numbers],
            last_choice=self._loads.last_choice[numbers],
            pin=None if pinned is None else _row_of(pinned, numbers),
            weights=None if key is None else self._rendezvous.weights(numbers, key),
            is_first_turn=is_first_turn,
            queue_weight=self._queue_weight,
        )

    def _go_on(self, ask: Ask) -> LastTurn | None:
        """Takes the last turn of this prompt's conversation, which counts at no home until its new turn was given to
        one.
        """
        turn = self._conversations[ask.is_prefill].take(ask.affinity_key, ask.names)
        if turn is not None:
            self._loads.leave(turn.home, turn.given_s)
        return turn

    def _give_turn(self, number: int, ask: Ask) -> LastTurn | None:
        turn = self._conversations[ask.is_prefill].put(ask.affinity_key, ask.names, number, self._loads.decayed_s)
        if turn is not None:
            self._loads.come(turn.home, turn.given_s)
        return turn

    def _take_back_turn(self, given: _Given) -> None:
        """Returns the conversation to the home where it was, unless it has gone on since."""
        if given.turn is None or not self._conversations[given.is_prefill].drop(given.turn):
            return
        self._loads.leave(given.turn.home, given.turn.given_s)
        if given.turn_before is not None:
            self._conversations[given.is_prefill].put_back(given.turn_before)
            self._loads.come(given.turn_before.home, given.turn_before.given_s)

    def _take(self, number: int, reservation: Reservation) -> None:
        self._next_number += 1
        self._reservations[reservation.number] = reservation
        self._unseen.add(reservation.number)
        loads, num_tokens = self._loads, reservation.num_tokens
        if reservation.affinity_key is not None:
            self._coming[reservation.affinity_key] = reservation
        loads.in_flight[number] += num_tokens
        loads.unseen[number] += num_tokens
        loads.give(number, reservation.num_left_tokens)
        loads.last_choice[number] = reservation.number


def _row_of(number: int, numbers: np.ndarray) -> int | None:
    """The row of a home's number in `numbers` [n]; None where it is not there."""
    rows = np.flatnonzero(numbers == number)
    return int(rows[0]) if len(rows) else None


def _affinity(ask: Ask, pinned: int | None, number: int) -> Affinity | None:
    if ask.affinity_key is None:
        return None
    return "miss" if pinned is None else "hit" if pinned == number else "moved"
