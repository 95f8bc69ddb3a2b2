"""How long a prompt will take to its first token, learned from those before it.

A worker's time is taken to be linear in the tokens to be computed and in the tokens queued before them; what it
depends on besides goes into the constant. The last few hundred prompts of each worker count, older ones less: who is
refused teaches nothing, so after a slow spell few come to show that it is over. While too little was seen of a worker,
all are taken to be alike.
Pure. What follows from a prediction is decided in `bound`. `routing.locality` does not use this model: it
fits prefill and transfer times by itself, for a pool and not for a worker, from one length and not two.

Source: non-negative least squares (Lawson and Hanson 1974, chapter 23), here by trying every subset.
"""

from collections import deque
from itertools import combinations

import numpy as np

MAX_SAMPLES = 256
MIN_SAMPLES = 16  # of a worker, before it is predicted by itself; of all together, before anything is
FIT_EVERY = 16  # samples
MEMORY = 0.97  # what a sample still weighs after the next one: some thirty count


class TtftModel:
    """A model of TTFT for each worker."""

    def __init__(self) -> None:
        self._workers: dict[str, _Samples] = {}
        self._all = _Samples()

    def observe(self, worker: str, *, own_tokens: int, queued_tokens: int, ttft_s: float) -> None:
        """A first token came from that worker after that time."""
        for known in (self._workers.setdefault(worker, _Samples()), self._all):
            known.observe((1.0, own_tokens, queued_tokens), ttft_s)

    def predict_s(self, worker: str, *, own_tokens: int, queued_tokens: int) -> float | None:
        """None while too little is known of all workers. The prediction is never negative and never decreases with more
        tokens.
        """
        features = (1.0, own_tokens, queued_tokens)
        known = self._workers.get(worker)
        predicted_s = None if known is None else known.predict(features)
        return self._all.predict(features) if predicted_s is None else predicted_s

    def forget(self, worker: str) -> None:
        """Forgets a worker, since another process will be at its address."""
        self._workers.pop(worker, None)


class _Samples:
    """The last samples of one worker, and the weights that fit them."""

    def __init__(self) -> None:
        self._features: deque[tuple[float, ...]] = deque(maxlen=MAX_SAMPLES)  # a constant, own tokens, queued tokens
        self._seconds: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._num_new = 0
        self._weights: np.ndarray | None = None  # [features]

    def observe(self, features: tuple[float, ...], seconds: float) -> None:
        self._features.append(features)
        self._seconds.append(seconds)
        self._num_new += 1

    def predict(self, features: tuple[float, ...]) -> float | None:
        if len(self._seconds) < MIN_SAMPLES:
            return None
        if self._weights is None or self._num_new >= FIT_EVERY:
            weights = np.sqrt(MEMORY ** np.arange(len(self._seconds))[::-1])  # of errors, which are squared
            seen, seconds = np.array(self._features), np.array(self._seconds)
            self._weights, self._num_new = fit(seen * weights[:, None], seconds * weights), 0
        return float(self._weights @ np.array(features))


def fit(features: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The weights [k], none below 0, with the least squared error over n samples: `features` [n k], `seconds` [n].

    Few features: every subset of them is tried, and of those without a negative weight the best one taken.
    """
    scale = np.maximum(features.max(axis=0), 1e-9)
    best, least = np.zeros(features.shape[1]), float(seconds @ seconds)
    for size in range(1, features.shape[1] + 1):
        for chosen in map(list, combinations(range(features.shape[1]), size)):
            weights = np.linalg.lstsq(features[:, chosen] / scale[chosen], seconds, rcond=None)[0]
            error = float(((features[:, chosen] / scale[chosen] @ weights - seconds) ** 2).sum())
            if weights.min() >= 0 and error < least:
                least, best = error, np.zeros(features.shape[1])
                best[chosen] = weights / scale[chosen]
    return best
