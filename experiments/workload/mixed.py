"""Requests of several shapes in one stream, such as long prompts with short answers among chats.

Of each shape there are as many as its weight says, in an order of their own for each seed: which shapes meet is left to
chance, as it is for a server, but not how many there are, so that repeats offer the same load. A request's shape is
told by its length.
"""

from collections.abc import Sequence
from random import Random

from moonshard.experiments.workload.arrivals import arrivals
from moonshard.experiments.workload.blocks import BlockPrompt
from moonshard.experiments.workload.plan import Planned, Workload, WorkloadError


def mixed(
    *,
    prompt_tokens: Sequence[int],
    output_tokens: Sequence[int],
    weights: Sequence[float],
    num_requests: int,
    rate_per_s: float,
    vocab_size: int,
    interval_cv: float = 1.0,
    seed: int = 0,
) -> Workload:
    """Fresh prompts. `prompt_tokens`, `output_tokens` and `weights` have an entry for each shape.

    A rate changes when requests come, never which ones: with one seed those of two rates are the same.

    Raises:
        WorkloadError: lists of different lengths, an entry that is no length, or weights that add up to nothing.
    """
    if not len(prompt_tokens) == len(output_tokens) == len(weights) > 0:
        raise WorkloadError("prompt_tokens, output_tokens and weights need an entry for each shape")
    if min(*prompt_tokens, *output_tokens, num_requests) < 1:
        raise WorkloadError("prompt_tokens, output_tokens and num_requests begin at 1")
    if not min(weights) >= 0 or not 0 < sum(weights) < float("inf"):
        raise WorkloadError("weights begin at 0, and one of them is more")
    shapes = _shares(weights, num_requests)
    Random(f"{seed} shapes").shuffle(shapes)
    times = arrivals(rate_per_s, interval_cv, num_requests, Random(seed))
    requests = []
    for number, (shape, at_s) in enumerate(zip(shapes, times, strict=True)):
        size = prompt_tokens[shape]
        prompt = BlockPrompt(blocks=(number,), num_tokens=size, block_tokens=size, vocab_size=vocab_size, seed=seed)
        requests.append(Planned(prompt=prompt, max_tokens=output_tokens[shape], at_s=at_s))
    return Workload(requests=requests)


def _shares(weights: Sequence[float], num_requests: int) -> list[int]:
    """The shape of each request. Counts are by largest remainder: none is off by a whole request."""
    ideal = [weight / sum(weights) * num_requests for weight in weights]
    counts = [int(share) for share in ideal]
    by_remainder = sorted(range(len(ideal)), key=lambda shape: counts[shape] - ideal[shape])
    for shape in by_remainder[: num_requests - sum(counts)]:
        counts[shape] += 1
    return [shape for shape, count in enumerate(counts) for _ in range(count)]
