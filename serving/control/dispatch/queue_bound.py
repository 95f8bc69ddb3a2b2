"""How many requests are let in at once, counted by those of them that wait for their first token."""

import itertools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueueFull:
    """Refused: as many wait as may."""

    num_waiting: int


class QueueBound:
    """Of one gateway. A request is a number of its own from `enter` to `leave`."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._numbers = itertools.count()
        self._running: set[int] = set()
        self._waiting: set[int] = set()  # of the running

    @property
    def num_running(self) -> int:
        return len(self._running)

    def enter(self) -> int | QueueFull:
        if len(self._waiting) >= self._max_waiting:
            return QueueFull(len(self._waiting))
        number = next(self._numbers)
        self._running.add(number)
        self._waiting.add(number)
        return number

    def begun(self, number: int) -> None:
        """Its first token is here. Nothing happens the second time."""
        self._waiting.discard(number)

    def leave(self, number: int) -> None:
        """However it ended. KeyError the second time."""
        self._running.remove(number)
        self._waiting.discard(number)
