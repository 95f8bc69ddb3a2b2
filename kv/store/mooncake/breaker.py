"""When to leave a failing service alone: a circuit breaker, as a state machine that is told the time.

After a failure nothing is attempted for a while, then one attempt tells whether all may go on. Seconds are of any one
clock. Not thread-safe. Source: M. Nygard, Release It!, "Circuit Breaker".
"""

from typing import NewType

Attempt = NewType("Attempt", int)


class Breaker:
    """Each attempt that `begin` allows ends with `succeed` or `fail`.

    It begins with the one attempt that tells. An attempt tells nothing once another has failed after it began.
    """

    def __init__(self, *, rest_s: float):
        self._rest_s = rest_s
        self._resting_until_s: float | None = float("-inf")  # None: all may go on
        self._is_probing = False
        self._attempt = Attempt(0)  # those allowed now, or the one that tells

    @property
    def is_closed(self) -> bool:
        """Whether all may go on."""
        return self._resting_until_s is None

    def begin(self, now_s: float) -> Attempt | None:
        """None: leave it alone."""
        if self._resting_until_s is None:
            return self._attempt
        if self._is_probing or now_s < self._resting_until_s:
            return None
        self._is_probing = True
        self._attempt = Attempt(self._attempt + 1)
        return self._attempt

    def succeed(self, attempt: Attempt) -> None:
        if attempt == self._attempt:
            self._resting_until_s = None
            self._is_probing = False

    def fail(self, attempt: Attempt, now_s: float) -> None:
        if attempt == self._attempt:
            self.trip(now_s)

    def trip(self, now_s: float) -> None:
        """It has failed, whatever an attempt may say."""
        self._resting_until_s = now_s + self._rest_s
        self._is_probing = False
        self._attempt = Attempt(self._attempt + 1)
