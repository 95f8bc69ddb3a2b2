"""How a home is chosen among several, by name, so that studies can compare.

Each policy looks at the same columns and returns a row. Pure, and but for the draws of `random` without memory: what a
policy goes by is in the columns.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from moonshard.serving.policy_names import PolicyName

EXCESS_WEIGHT = 0.05  # beside 1 of a token to be computed: see experiments/replay/README.md
MAX_PIN_LOAD = 1.25  # of the mean: a home with more is left


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """The homes to choose among, a row each."""

    left_tokens: np.ndarray  # [n] int64: of the request's prompt, that would have to be computed there
    queued_tokens: np.ndarray  # [n] int64: of other requests, before this one
    excess_tokens: np.ndarray  # [n] float64: given to it lately, beyond the mean
    total_tokens: np.ndarray  # [n] int64: ever given to it: among equals the least
    last_choice: np.ndarray  # [n] int64: when it was chosen last, in decisions; below 0: never
    pin: int | None  # the row where the session was last
    queue_weight: float  # what a token in the queue counts beside one to be computed


Policy = Callable[[Candidates], int]


def cost(candidates: Candidates) -> int:
    """Where the session was, unless that home is overloaded; else the least work before and for this request.

    What a home was given lately counts a little too. Where queues are empty, whoever knows the system prompt would
    otherwise get every session that begins with it.
    Source: the bounded loads of consistent hashing (Mirrokni et al., arXiv 1608.01350) for when to leave.
    """
    if candidates.pin is not None and not is_overloaded(candidates, candidates.pin):
        return candidates.pin
    queue = candidates.queue_weight * candidates.queued_tokens + EXCESS_WEIGHT * candidates.excess_tokens
    costs = candidates.left_tokens + queue
    return _least(costs, candidates.total_tokens)


def affinity(candidates: Candidates) -> int:
    """Where the session was, whatever the load; a new one goes where the fewest tokens are queued."""
    return least_tokens(candidates) if candidates.pin is None else candidates.pin


def least_tokens(candidates: Candidates) -> int:
    return _least(candidates.queued_tokens, candidates.last_choice)


def round_robin(candidates: Candidates) -> int:
    return int(candidates.last_choice.argmin())


def at_random(seed: int = 0) -> Policy:
    draw = random.Random(seed)
    return lambda candidates: draw.randrange(len(candidates.queued_tokens))


def is_overloaded(candidates: Candidates, row: int) -> bool:
    """Whether a home has much more to do than the others, this request included."""
    queued = candidates.queued_tokens + candidates.left_tokens
    return bool(queued[row] > MAX_PIN_LOAD * queued.mean() + candidates.left_tokens[row])


def policy_of(name: PolicyName) -> Policy:
    """A policy of its own for each caller: `random` draws from a state."""
    policies: Mapping[PolicyName, Callable[[], Policy]] = {
        "cost": lambda: cost,
        "affinity": lambda: affinity,
        "round_robin": lambda: round_robin,
        "random": at_random,
        "least_tokens": lambda: least_tokens,
    }
    return policies[name]()


def _least(values: np.ndarray, among_equals: np.ndarray) -> int:
    """The row of the least of [n], of equal ones that with the least of `among_equals` [n]."""
    rows = np.flatnonzero(values == values.min())
    return int(rows[among_equals[rows].argmin()])
