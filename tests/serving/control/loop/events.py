"""Virtual time: events in the order of their times, and of their making where these are equal. No clock, no asyncio."""

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class Events:
    """`log` tells what happened, with its time, so that two runs can be compared."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.log: list[tuple[Any, ...]] = []
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, do: Callable[..., None], *what: Any) -> None:
        heapq.heappush(self._heap, (max(time_s, self.now_s), next(self._numbers), do, what))

    def after(self, delay_s: float, do: Callable[..., None], *what: Any) -> None:
        self.at(self.now_s + delay_s, do, *what)

    def note(self, *what: Any) -> None:
        self.log.append((round(self.now_s, 9), *what))

    def run(self, is_over: Callable[[], bool], limit_s: float) -> None:
        """Runs until `is_over`. AssertionError where time or events run out before."""
        while not is_over():
            assert self._heap, "nothing will ever happen again"
            self.now_s, _, do, what = heapq.heappop(self._heap)
            assert self.now_s < limit_s, f"not over after {limit_s} s"
            do(*what)
