"""Which layers each stage of a pipeline has: contiguous, as evenly weighed as the layers allow."""

import itertools
import math
from collections.abc import Sequence

NO_SPLIT = (math.inf, 0)


def split_layers(
    costs: Sequence[float], num_stages: int, *, before: float = 0.0, after: float = 0.0
) -> tuple[int, ...]:
    """How many layers each stage has, so that the heaviest stage is as light as it can be.

    Args:
        costs: of each layer, in any unit: bytes or time.
        before: what the first stage carries besides, as the embeddings.
        after: what the last stage carries besides, as the head.

    Raises:
        ValueError: fewer layers than stages.
    """
    num_layers = len(costs)
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"{num_layers} layers cannot make {num_stages} stages")
    sums = [0.0, *itertools.accumulate(costs)]

    def weight(start: int, stop: int) -> tuple[float, int]:
        """The cost of one stage; of two with equal cost, the one with fewer layers is lighter."""
        ends = before * (start == 0) + after * (stop == num_layers)
        return sums[stop] - sums[start] + ends, stop - start

    # heaviest[stop] of the best split of the layers before `stop` so far, and where its last stage starts.
    heaviest = [weight(0, stop) if stop else NO_SPLIT for stop in range(num_layers + 1)]
    starts: list[list[int]] = []
    for _ in range(num_stages - 1):
        splits = [
            min(((max(heaviest[start], weight(start, stop)), start) for start in range(1, stop)), default=(NO_SPLIT, 0))
            for stop in range(num_layers + 1)
        ]
        heaviest = [found for found, _ in splits]
        starts.append([start for _, start in splits])
    counts, stop = list[int](), num_layers
    for column in reversed(starts):
        counts.append(stop - column[stop])
        stop = column[stop]
    return (stop, *reversed(counts))
