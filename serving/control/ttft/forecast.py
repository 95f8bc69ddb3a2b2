"""The predicted time to first token (TTFT) of a request that is reserved on a worker, learned from requests before
it.
"""

import math
from collections.abc import Sequence

from moonshard.serving.control.routing.router import Home, Reservation, Router
from moonshard.serving.control.ttft.model import TtftModel

LEAST_TTFT_S = 0.1  # so long it is taken to stay what it is: under overload everybody is told of it


class TtftForecast:
    """The forecasts of one router, for all of its workers."""

    def __init__(self, router: Router) -> None:
        self.model = TtftModel()
        self._router = router
        self._least: tuple[float, float | None] = (-math.inf, None)  # when that was, and what

    def observe(self, kept: Reservation, ttft_s: float) -> None:
        """A first token came, so long after its request was sent."""
        self.model.observe(
            kept.home.worker, own_tokens=kept.num_left_tokens, queued_tokens=kept.num_queued_tokens, ttft_s=ttft_s
        )

    def predict_s(self, kept: Reservation, *, is_alone: bool = False) -> float | None:
        """Seconds from the sending of the request to its first token; None while too little was seen of that worker.

        `is_alone`: as if nothing were queued there.
        """
        queued_tokens = 0 if is_alone else kept.num_queued_tokens
        return self.model.predict_s(kept.home.worker, own_tokens=kept.num_left_tokens, queued_tokens=queued_tokens)

    def least_s(self, homes: Sequence[Home], now_s: float) -> float | None:
        """The predicted TTFT of the shortest prompt on the worker that is soonest, as of a moment ago; None while
        nothing is known.
        """
        if now_s - self._least[0] >= LEAST_TTFT_S:
            self._least = now_s, self._find_least_s(homes)
        return self._least[1]

    def forget(self, worker: str) -> None:
        """Forgets what was learned of a worker, since another process will be at its address."""
        self.model.forget(worker)

    def _find_least_s(self, homes: Sequence[Home]) -> float | None:
        predicted = (
            self.model.predict_s(home.worker, own_tokens=1, queued_tokens=queued_tokens)
            for home, queued_tokens in zip(homes, self._router.queues(homes), strict=True)
        )
        return min((seconds for seconds in predicted if seconds is not None), default=None)
