"""Requests of several shapes in one stream, such as long prompts with short answers among chats.

Each request is of a shape drawn by weight, and at a time of its own: which shapes meet is left to chance, as it is for
a server. A request's shape is told by its length.
"""

from collections.abc import Sequence
from itertools import islice
from random import Random

from moonshard.experiments.workload.arrivals import gamma
from moonshard.experiments.workload.blocks import BlockPrompt
from moonshard.experiments.workload.plan import Planned, Workload, WorkloadError


def mixed(
    *,
    num_prompt: Sequence[int],
    num_output: Sequence[int],
    weights: Sequence[float],
    num_requests: int,
    rate_per_s: float,
    vocab_size: int,
    variation: float = 1.0,
    seed: int = 0,
) -> Workload:
    """Fresh prompts. `num_prompt`, `num_output` and `weights` have an entry for each shape.

    A rate changes when requests come, never which ones: with one seed those of two rates are the same.

    Raises:
        WorkloadError: lists of different lengths, an entry that is no length, or weights that add up to nothing.
    """
    if not len(num_prompt) == len(num_output) == len(weights) > 0:
        raise WorkloadError("num_prompt, num_output and weights need an entry for each shape")
    if min(*num_prompt, *num_output, num_requests) < 1:
        raise WorkloadError("num_prompt, num_output and num_requests begin at 1")
    if not min(weights) >= 0 or not 0 < sum(weights) < float("inf"):
        raise WorkloadError("weights begin at 0, and one of them is more")
    shapes = Random(f"{seed} shapes").choices(range(len(weights)), weights, k=num_requests)
    times = islice(gamma(rate_per_s, variation, Random(seed)), num_requests)
    requests = []
    for place, (shape, at_s) in enumerate(zip(shapes, times, strict=True)):
        size = num_prompt[shape]
        prompt = BlockPrompt(blocks=(place,), num_tokens=size, block_tokens=size, vocab_size=vocab_size, seed=seed)
        requests.append(Planned(prompt=prompt, max_tokens=num_output[shape], at_s=at_s))
    return Workload(requests=requests)
