"""The steps of a scheduler between decision and completion: decided, handed out, completed, in one order.

It decides nothing: it numbers the steps and remembers which occupancies and blocks each one uses. What a completion
means is `scheduler`'s.
"""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moonshard.serving.control.batching.sequence import Occupancy
from moonshard.serving.control.plan import Plan


class Draw(NamedTuple):
    """Which occupancy a step draws for, and the least and the most tokens that gives. Made for every token."""

    occupancy: Occupancy
    least: int = 1
    most: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A plan, the occupancies it uses, what it draws, and blocks that are held for it alone."""

    plan: Plan
    occupancies: tuple[Occupancy, ...]
    draws: tuple[Draw, ...] = ()
    borrowed: tuple[tuple[int, int], ...] = ()  # (partition, block)


class Launches:
    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._outbox: deque[Launch] = deque()  # decided, not handed out
        self._in_flight: deque[Launch] = deque()  # handed out, not completed

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def has_decided(self) -> bool:
        """Whether a step is ready to be handed out."""
        return bool(self._outbox)

    def next_number(self) -> int:
        """The number for the plan that is pushed next."""
        return next(self._numbers)

    def push(
        self,
        plan: Plan,
        occupancies: Sequence[Occupancy],
        draws: Sequence[Draw] = (),
        borrowed: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Adds a step. Its occupancies keep what they hold until it has completed, and expect the tokens that it draws.

        References to `borrowed` blocks go over to the step, and are released by whoever completes it.
        """
        for occupancy in occupancies:
            occupancy.num_in_flight += 1
        for occupancy, least, most in draws:
            occupancy.num_pending += most
            occupancy.num_unsure += most - least
        self._outbox.append(
            Launch(plan=plan, occupancies=tuple(occupancies), draws=tuple(draws), borrowed=tuple(borrowed))
        )

    def hand_out(self) -> Plan | None:
        """The next step, from now on in flight."""
        if not self._outbox:
            return None
        self._in_flight.append(self._outbox.popleft())
        return self._in_flight[-1].plan

    def complete(self, number: int) -> Launch:
        """The oldest step in flight. Raises ValueError where that has another number."""
        if not self._in_flight or self._in_flight[0].plan.number != number:
            raise ValueError(f"step {number} is not the oldest in flight")
        return self._in_flight.popleft()
