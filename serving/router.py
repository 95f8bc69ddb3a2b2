"""Which partition of which worker takes a request, or one leg of it: the one with the fewest tokens in flight.

Pure: no clock, no I/O. A reservation is made at the moment of decision, for every token the request may come to hold,
and released exactly once: counting requests, or counting when a stream begins, sends a burst to one worker. Left out:
roles, since the caller names the partitions to choose among; what a worker itself reports; prefix hits.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Home:
    """A worker's partition: a request stays in it for as long as that worker serves it."""

    worker: str
    partition: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """Tokens held against a partition from the decision until the request ends."""

    number: int
    home: Home
    num_tokens: int


class Router:
    """Tokens in flight per partition. A worker that is away keeps its reservations: they end with their requests."""

    def __init__(self) -> None:
        self._reservations: dict[int, Reservation] = {}
        self._in_flight_tokens: dict[Home, int] = {}
        self._last_choice: dict[Home, int] = {}
        self._next_number = 0

    def reserve(self, homes: Sequence[Home], num_tokens: int) -> Reservation | None:
        """Choose among `homes`; None when there is none. Equal loads: the one chosen longest ago."""
        if not homes:
            return None
        home = min(homes, key=lambda home: (self.in_flight_tokens(home), self._last_choice.get(home, -1)))
        reservation = Reservation(self._next_number, home, num_tokens)
        self._next_number += 1
        self._last_choice[home] = reservation.number
        self._reservations[reservation.number] = reservation
        self._in_flight_tokens[home] = self.in_flight_tokens(home) + num_tokens
        return reservation

    def release(self, reservation: Reservation) -> None:
        """KeyError when it was released before."""
        del self._reservations[reservation.number]
        self._in_flight_tokens[reservation.home] -= reservation.num_tokens

    def in_flight_tokens(self, home: Home) -> int:
        """Of the open reservations of a partition."""
        return self._in_flight_tokens.get(home, 0)

    def worker_tokens(self, worker: str) -> int:
        """Of the open reservations of all of a worker's partitions."""
        return sum(tokens for home, tokens in self._in_flight_tokens.items() if home.worker == worker)
