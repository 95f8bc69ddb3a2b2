"""How a home is chosen among several, by name, so that studies can compare.

Each policy looks at the same columns and returns a row. Pure, and but for the draws of `random` without memory: what a
policy goes by is in the columns. A new one is a function here, an entry in `policy_of`, a name in `names` and a word in
the README's row of `routing.policy`; a new column is filled by `router`.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from moonshard.serving.control.routing.names import PolicyName

SHARE_WEIGHT = 3.0  # of what a home has beyond its share, in shares: see experiments/replay/README.md
FEW_CONVERSATIONS, FEW_TOKENS = 0.25, 512.0  # that make no difference, such as what is left of an hour ago
MAX_WEIGHED_TOKENS = 2048  # of a prompt: what is longer is work for a while, and the queue tells of it
MAX_LATER_WEIGHT = 0.5  # of a token of a later turn: for the others' sake its context is not computed anew
MAX_PIN_LOAD = 1.25  # of the mean: a home with more is left
FEW_EXTRA = 2.0  # conversations beyond that share: of a few, a home may have some more than another


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """The homes to choose among, in columns with a row for each."""

    left_tokens: np.ndarray  # [n] int64: of the request's prompt, that would have to be computed there
    queued_tokens: np.ndarray  # [n] int64: of other requests, before this one
    recent_tokens: np.ndarray  # [n] float64: given to it lately
    conversations: np.ndarray  # [n] float64: that were there last, those of a while ago less
    total_tokens: np.ndarray  # [n] int64: ever given to it: among equals the least
    last_choice: np.ndarray  # [n] int64: when it was chosen last, in decisions; below 0: never
    pin: int | None  # the row where the affinity key was last
    weights: np.ndarray | None  # [n] uint64: of the affinity key's rendezvous, as `routing.rendezvous` has them
    is_first_turn: bool  # no earlier one of its conversation is known
    queue_weight: float  # what a token in the queue counts beside one to be computed


Policy = Callable[[Candidates], int]


def cost(candidates: Candidates) -> int:
    """Where the affinity key was, unless that home is overloaded; else the least work before and for this request.

    A key that was nowhere, with a prompt of which no home knows more than another, goes where every gateway would send
    it, so that sessions whose requests come through several gateways stay in one place. That home is passed over where
    it is overloaded, or has more than its share of the conversations that this gateway knows of.

    What is computed somewhere stays there, and so do its later turns. So a first turn counts more at a home that has
    more than its share of the conversations, and of what was computed lately, both taken together. Without that, where
    queues are empty whoever knows the system prompt would get every session that begins with it; and going by what was
    computed alone, a home that is behind would get new sessions until their later turns are more than its cache holds.
    A later turn leaves its home for that only where two thirds of it are to be computed there, too.
    Source: the bounded loads of consistent hashing (Mirrokni et al., arXiv 1608.01350) for when to leave.
    """
    if candidates.pin is not None and not is_overloaded(candidates, candidates.pin):
        return candidates.pin
    if candidates.pin is None and candidates.weights is not None and np.ptp(candidates.left_tokens) == 0:
        return _by_rendezvous(candidates, candidates.weights)
    costs = candidates.left_tokens + candidates.queue_weight * candidates.queued_tokens + _beyond_share(candidates)
    return _least(costs, candidates.total_tokens)


def affinity(candidates: Candidates) -> int:
    """Where the affinity key was, or else where every gateway would send it, whatever the load; a request without one
    goes where the fewest tokens are queued.
    """
    if candidates.pin is not None:
        return candidates.pin
    return least_tokens(candidates) if candidates.weights is None else int(candidates.weights.argmax())


def least_tokens(candidates: Candidates) -> int:
    return _least(candidates.queued_tokens, candidates.last_choice)


def round_robin(candidates: Candidates) -> int:
    return int(candidates.last_choice.argmin())


def at_random(seed: int = 0) -> Policy:
    draw = random.Random(seed)
    return lambda candidates: draw.randrange(len(candidates.queued_tokens))


def is_overloaded(candidates: Candidates, row: int) -> bool:
    """Whether a home has much more to do than the others, this request included."""
    return bool(_are_overloaded(candidates)[row])


def policy_of(name: PolicyName) -> Policy:
    """A policy for one caller: `random` has a state of its own for each."""
    policies: Mapping[PolicyName, Callable[[], Policy]] = {
        "cost": lambda: cost,
        "affinity": lambda: affinity,
        "round_robin": lambda: round_robin,
        "random": at_random,
        "least_tokens": lambda: least_tokens,
    }
    return policies[name]()


def _are_overloaded(candidates: Candidates) -> np.ndarray:
    """[n] bool: never of the home with the least to do."""
    queued = candidates.queued_tokens + candidates.left_tokens
    return queued > MAX_PIN_LOAD * queued.mean() + candidates.left_tokens


def _by_rendezvous(candidates: Candidates, weights: np.ndarray) -> int:
    """The row with the largest of the weights [n], of those that may have one more conversation.

    Gateways count conversations each for itself, so at that bound they may disagree. Then the home that was chosen
    tells all of them that it knows the prompt, where that is a block or more.

    Source: consistent hashing with bounded loads (Mirrokni et al., arXiv 1608.01350).
    """
    conversations = candidates.conversations
    has_enough = conversations > MAX_PIN_LOAD * conversations.mean() + FEW_EXTRA
    open_rows = np.flatnonzero(~(_are_overloaded(candidates) | has_enough))
    rows = open_rows if len(open_rows) else np.flatnonzero(~_are_overloaded(candidates))
    return int(rows[weights[rows].argmax()])


def _beyond_share(candidates: Candidates) -> np.ndarray:
    """[n] tokens that a home costs for having more than its share."""
    of_conversations = _surplus(candidates.conversations, FEW_CONVERSATIONS)
    of_tokens = _surplus(candidates.recent_tokens, FEW_TOKENS)
    weight = SHARE_WEIGHT * np.maximum(0.0, of_conversations + of_tokens)
    if not candidates.is_first_turn:
        weight = np.minimum(weight, MAX_LATER_WEIGHT)
    return np.minimum(candidates.left_tokens, MAX_WEIGHED_TOKENS) * weight


def _surplus(values: np.ndarray, few: float) -> np.ndarray:
    """[n] of [n]: by how much each is more than the mean, in means; next to 0 where all together are less than few."""
    mean = values.mean()
    return (values - mean) / (mean + few)


def _least(values: np.ndarray, among_equals: np.ndarray) -> int:
    """The row of the smallest of [n]; of equals the one with the smallest of `among_equals` [n]."""
    rows = np.flatnonzero(values == values.min())
    return int(rows[among_equals[rows].argmin()])
