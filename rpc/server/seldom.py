"""What is worth a line in the log, and is not to fill it: each thing at most once a minute. Bounded.

Who is refused may ask again as often as it likes, and for days. Only the first line would scroll away.
"""

import time
from collections.abc import Callable

PERIOD_S = 60.0
MOST = 32  # things in a period


class Seldom:
    """Remembers what was said lately, in the order in which it was."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._said_s: dict[tuple[str, ...], float] = {}

    def may_say(self, *thing: str) -> bool:
        """Whether this may be said now; whoever asks says it."""
        now_s = self._clock_s()
        self._forget(now_s - PERIOD_S)
        if thing in self._said_s or len(self._said_s) >= MOST:
            return False
        self._said_s[thing] = now_s
        return True

    def _forget(self, before_s: float) -> None:
        while self._said_s and self._said_s[(first := next(iter(self._said_s)))] <= before_s:
            del self._said_s[first]
