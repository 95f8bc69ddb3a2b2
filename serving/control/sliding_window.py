"""How much of something was used within the last while: a window that slides, as two numbers for each name.

Time is cut into windows. What counts at a moment is this window's use, and of the last window's as much as still lies
within one window's length. Time is an argument, to be read off a clock that nobody sets.
"""

import math
from dataclasses import dataclass


@dataclass(slots=True)
class _Uses:
    number: int = 0  # of the window that `now` is of
    before: int = 0
    now: int = 0


class SlidingWindow:
    """A sliding window for each of several names."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._uses: dict[str, _Uses] = {}

    def num_used(self, name: str, now_s: float) -> int:
        uses = self._at(name, now_s)
        return uses.now + math.floor(uses.before * self._left_s(now_s) / self.window_s)

    def use(self, name: str, amount: int, now_s: float) -> None:
        self._at(name, now_s).now += amount

    def wait_s(self, name: str, num_allowed: int, now_s: float) -> float:
        """Seconds until no more than so many (0 or more) count, if nobody uses any meanwhile."""
        uses, left_s = self._at(name, now_s), self._left_s(now_s)
        if uses.now > num_allowed:
            return left_s + self.window_s - self.window_s * num_allowed / uses.now
        if not uses.before:
            return 0.0
        return max(0.0, left_s - self.window_s * (num_allowed - uses.now) / uses.before)

    def _left_s(self, now_s: float) -> float:
        """Seconds that are left of the current window."""
        return self.window_s - now_s % self.window_s

    def _at(self, name: str, now_s: float) -> _Uses:
        uses, number = self._uses.setdefault(name, _Uses()), math.floor(now_s / self.window_s)
        if number > uses.number:
            uses.before = uses.now if number == uses.number + 1 else 0
            uses.number, uses.now = number, 0
        return uses
