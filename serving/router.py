"""Which worker takes a request, or one leg of it: the one with the fewest tokens in flight.

Pure: no clock, no I/O. A reservation is made at the moment of decision, for every token the request may come to hold,
and released exactly once: counting requests, or counting when a stream begins, sends a burst to one worker. Left out:
roles, since the caller names the workers to choose among; what a worker itself reports; prefix hits.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reservation:
    """Tokens held against a worker from the decision until the request ends."""

    number: int
    worker: str
    num_tokens: int


class Router:
    """Tokens in flight per worker. A worker that is away keeps its reservations: they end with their requests."""

    def __init__(self) -> None:
        self._reservations: dict[int, Reservation] = {}
        self._in_flight_tokens: dict[str, int] = {}
        self._last_choice: dict[str, int] = {}
        self._next_number = 0

    def reserve(self, workers: list[str], num_tokens: int) -> Reservation | None:
        """Choose among `workers`; None when there is none. Equal loads: the one chosen longest ago."""
        if not workers:
            return None
        worker = min(workers, key=lambda name: (self.in_flight_tokens(name), self._last_choice.get(name, -1)))
        reservation = Reservation(self._next_number, worker, num_tokens)
        self._next_number += 1
        self._last_choice[worker] = reservation.number
        self._reservations[reservation.number] = reservation
        self._in_flight_tokens[worker] = self.in_flight_tokens(worker) + num_tokens
        return reservation

    def release(self, reservation: Reservation) -> None:
        """KeyError when it was released before."""
        del self._reservations[reservation.number]
        self._in_flight_tokens[reservation.worker] -= reservation.num_tokens

    def in_flight_tokens(self, worker: str) -> int:
        return self._in_flight_tokens.get(worker, 0)
