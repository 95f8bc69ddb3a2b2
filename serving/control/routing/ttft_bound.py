"""Which requests are refused since their first token would come late, and when they are to come back. Pure."""

import math
from collections import deque
from typing import Literal

AUTO_WAIT_S = 2.0  # why: experiments/studies/overload/README.md
AUTO_STRETCH = 4.0  # of a prompt's own time: on a slow machine a few others before it are no overload
LATELY_S = 5.0
MAX_RETRY_AFTER_S = 60.0


def ttft_limit_s(slo_s: float | Literal["auto"] | None, alone_s: float) -> float:
    """The longest predicted TTFT, in seconds, at which a request is taken; inf where there is no bound.

    `alone_s`: what its TTFT would be with nothing queued.
    """
    match slo_s:
        case None:
            return math.inf
        case "auto":
            return alone_s + max(AUTO_WAIT_S, AUTO_STRETCH * alone_s)
        case _:
            return slo_s


class Refusals:
    """When to come back. Those who were refused lately come before: all at once they would be refused again."""

    def __init__(self) -> None:
        self._refused_s = deque[float]()

    def retry_after_s(self, now_s: float, *, excess_s: float, alone_s: float) -> float:
        """For one more, refused now.

        `excess_s`: by how much its first token would come too late. `alone_s`: its TTFT with nothing queued.
        """
        while self._refused_s and now_s - self._refused_s[0] > LATELY_S:
            self._refused_s.popleft()
        num_before = len(self._refused_s)
        self._refused_s.append(now_s)
        return min(MAX_RETRY_AFTER_S, max(1.0, excess_s + num_before * alone_s))
