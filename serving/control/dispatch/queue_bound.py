"""How many requests are let in at once, counted by those of them that wait for their first token."""

import itertools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TooManyWaiting:
    """A request is refused since as many wait as may."""

    num_waiting: int


class QueueBound:
    """The bound of one gateway. `enter` gives each request a number, which the other verbs take, until `leave`."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._numbers = itertools.count()
        self._running: set[int] = set()
        self._waiting: set[int] = set()  # of the running

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def enter(self) -> int | TooManyWaiting:
        if len(self._waiting) >= self._max_waiting:
            return TooManyWaiting(len(self._waiting))
        number = next(self._numbers)
        self._running.add(number)
        self._waiting.add(number)
        return number

    def begun(self, number: int) -> None:
        """The first token of the request has come. A second call does nothing."""
        self._waiting.discard(number)

    def leave(self, number: int) -> None:
        """The request has ended, in whatever way. KeyError when called a second time."""
        self._running.remove(number)
        self._waiting.discard(number)
