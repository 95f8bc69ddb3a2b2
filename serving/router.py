"""Which partition of which worker takes a request, or one leg of it, by tokens and by what is known of its prompt.

Pure: no I/O, and time is an argument. A reservation is made at the moment of decision, for every token the request may
come to hold, and released exactly once: counting requests, or counting when a stream begins, sends a burst to one
worker. A worker that reports its queue is believed, and what it has not seen yet is added: so several routers agree.
Left out: roles, since the caller names the homes to choose among, and how each is chosen (`serving.policies`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from moonshard.serving.affinity import Pins
from moonshard.serving.policies import Candidates, Policy, least_tokens
from moonshard.serving.policy_names import QUEUE_WEIGHT
from moonshard.serving.prefix_index import BlockName, PrefixIndex

Affinity = Literal["hit", "miss", "moved"]


@dataclass(frozen=True, slots=True)
class Home:
    """A worker's partition: where a request lives for life."""

    worker: str
    partition: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What the router must know of a request, or of one leg of it."""

    num_tokens: int  # that it may come to hold
    num_prompt: int = 0  # of these, that have to be computed there, or moved there, unless they are known
    is_prefill: bool = False  # it ends with its prompt: what is known weighs nothing
    names: Sequence[BlockName] = ()  # of the prompt's full blocks
    block_size: int = 64
    session: bytes | None = None


@dataclass(frozen=True, slots=True)
class Reservation:
    """Tokens held against a partition from the decision until the request ends."""

    number: int
    home: Home
    num_tokens: int
    num_known_tokens: int = 0  # of the prompt
    num_queued_tokens: int = 0  # there, before it
    affinity: Affinity | None = None  # None: without a session


@dataclass(slots=True)
class _Load:
    """What a home has to do, in tokens."""

    index: int
    in_flight: int = 0
    unseen: dict[int, int] = field(default_factory=dict)  # of reservations that it does not report yet
    reported: int | None = None
    total: int = 0
    last_choice: int = -1

    @property
    def queued(self) -> int:
        return self.in_flight if self.reported is None else self.reported + sum(self.unseen.values())


class Router:
    """Tokens in flight per partition. A worker that is away keeps its reservations: they end with their requests."""

    def __init__(self, *, queue_weight: float = QUEUE_WEIGHT, pins: Pins | None = None) -> None:
        self.index = PrefixIndex()
        self._queue_weight = queue_weight
        self._pins = pins or Pins()
        self._loads: dict[Home, _Load] = {}
        self._reservations: dict[int, Reservation] = {}
        self._next_number = 0

    def home_number(self, home: Home) -> int:
        """As the index and the pins know it."""
        return self._load(home).index

    def reserve(
        self, homes: Sequence[Home], ask: Ask, *, policy: Policy = least_tokens, now_s: float = 0.0
    ) -> Reservation | None:
        """Choose among `homes`; None when there is none."""
        if not homes:
            return None
        loads = [self._load(home) for home in homes]
        known = self._known_tokens(loads, ask)
        pin = self._pin(loads, ask, now_s)
        row = policy(self._candidates(loads, ask, known, pin))
        num_known = int(known[row])
        num_tokens = ask.num_tokens - num_known if ask.is_prefill else ask.num_tokens
        affinity, num_queued = _affinity(ask, pin, row), loads[row].queued
        reservation = Reservation(self._next_number, homes[row], num_tokens, num_known, num_queued, affinity)
        self._take(loads[row], reservation)
        if ask.session is not None:
            self._pins.put(ask.session, loads[row].index, now_s)
        return reservation

    def seen(self, reservation: Reservation) -> None:
        """From its next report on, the worker counts this one itself."""
        self._loads[reservation.home].unseen.pop(reservation.number, None)

    def report(self, home: Home, queued_tokens: int) -> None:
        """What a worker says that it has to do there; it need not know of reservations that were not seen."""
        self._load(home).reported = queued_tokens

    def silent(self, home: Home) -> None:
        """It reports no more: reservations are all there is to go by."""
        self._load(home).reported = None

    def release(self, reservation: Reservation) -> None:
        """KeyError when it was released before."""
        del self._reservations[reservation.number]
        load = self._loads[reservation.home]
        load.in_flight -= reservation.num_tokens
        load.unseen.pop(reservation.number, None)

    def in_flight_tokens(self, home: Home) -> int:
        return self._loads[home].in_flight if home in self._loads else 0

    def worker_tokens(self, worker: str) -> int:
        """In flight at all of a worker's partitions."""
        return sum(load.in_flight for home, load in self._loads.items() if home.worker == worker)

    def _load(self, home: Home) -> _Load:
        if home not in self._loads:
            self._loads[home] = _Load(len(self._loads))
        return self._loads[home]

    def _known_tokens(self, loads: Sequence[_Load], ask: Ask) -> np.ndarray:
        """Of the prompt, at each home: never its last token, which is always computed."""
        known = np.zeros(len(loads), np.int64)
        if ask.names and (found := self.index.num_known(ask.names)):
            for row, load in enumerate(loads):
                if load.index in found:
                    known[row] = min(found[load.index] * ask.block_size, ask.num_prompt - 1)
        return known

    def _pin(self, loads: Sequence[_Load], ask: Ask, now_s: float) -> int | None:
        """The row where the session was; below 0 where that home is not among these."""
        pinned = None if ask.session is None else self._pins.find(ask.session, now_s)
        if pinned is None:
            return None
        return next((row for row, load in enumerate(loads) if load.index == pinned), -1)

    def _candidates(self, loads: Sequence[_Load], ask: Ask, known: np.ndarray, pin: int | None) -> Candidates:
        columns = np.array([(load.queued, load.total, load.last_choice) for load in loads], np.int64)
        return Candidates(
            left_tokens=ask.num_prompt - known,
            queued_tokens=columns[:, 0],
            total_tokens=columns[:, 1],
            last_choice=columns[:, 2],
            pin=None if pin == -1 else pin,
            queue_weight=self._queue_weight,
        )

    def _take(self, load: _Load, reservation: Reservation) -> None:
        self._next_number += 1
        self._reservations[reservation.number] = reservation
        load.in_flight += reservation.num_tokens
        load.unseen[reservation.number] = reservation.num_tokens
        load.total += reservation.num_tokens
        load.last_choice = reservation.number


def _affinity(ask: Ask, pin: int | None, row: int) -> Affinity | None:
    if ask.session is None:
        return None
    return "miss" if pin is None else "hit" if pin == row else "moved"
