"""Which requests are refused because their first token would come too late, and when they are to come back."""

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

AUTO_WAIT_S = 2.0  # why: experiments/studies/overload/README.md
AUTO_STRETCH = 4.0  # of a prompt's own time: on a slow machine a few others before it are no overload
LATELY_S = 5.0
MAX_RETRY_AFTER_S = 60.0

type TtftSlo = float | Literal["auto"] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TooLate:
    """Why a request is refused."""

    predicted_s: float  # its time to first token
    limit_s: float
    retry_after_s: float


def ttft_limit_s(slo_s: TtftSlo, alone_s: float) -> float:
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
    """When refused requests are told to come back: one after the other, since all at once would be refused again."""

    def __init__(self) -> None:
        self._refused_s = deque[float]()

    def retry_after_s(self, now_s: float, *, excess_s: float, alone_s: float) -> float:
        """For one more request, refused now.

        `excess_s`: by how much its first token would come too late. `alone_s`: its TTFT with nothing queued.
        """
        while self._refused_s and now_s - self._refused_s[0] > LATELY_S:
            self._refused_s.popleft()
        num_before = len(self._refused_s)
        self._refused_s.append(now_s)
        return min(MAX_RETRY_AFTER_S, max(1.0, excess_s + num_before * alone_s))


class TtftBound:
    """The bound of one gateway. `slo_s` is as in `ttft_limit_s`."""

    def __init__(self, slo_s: TtftSlo) -> None:
        self._slo_s: TtftSlo = slo_s
        self._refusals = Refusals()

    def refusal(
        self, now_s: float, *, predicted_s: float | None, alone_s: float | None, num_queued_tokens: int
    ) -> TooLate | None:
        """None for a request that is taken, which is also the case while nothing can be predicted.

        A request that finds nothing queued is never refused: its TTFT is the least possible, and the model learns from
        it.
        """
        if predicted_s is None or alone_s is None or not num_queued_tokens:
            return None
        limit_s = ttft_limit_s(self._slo_s, alone_s)
        if predicted_s <= limit_s:
            return None
        retry_after_s = self._refusals.retry_after_s(now_s, excess_s=predicted_s - limit_s, alone_s=alone_s)
        return TooLate(predicted_s=predicted_s, limit_s=limit_s, retry_after_s=retry_after_s)
