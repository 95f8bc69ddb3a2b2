"""When requests come: at random with a rate, in bursts, or each when another has gone.

Gamma intervals as in BurstGPT (arXiv 2401.17644), told by their coefficient of variation: 1 is Poisson's process,
less is steadier, more is bursts. `--burstiness` of vLLM's benchmark is the gamma distribution's shape instead, which is
interval_cv ** -2. As in vLLM's benchmark, what is drawn is then stretched to the rate that was asked for, so that
repeats offer the same load.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random

from moonshard.experiments.workload.plan import WorkloadError

MIN_CV = 1e-6  # below it intervals are all the same


def arrivals(rate_per_s: float, interval_cv: float, num_requests: int, random: Random) -> Sequence[float]:
    """Seconds after the start. The mean interval is 1 / rate; with cv 0 all intervals are equal."""
    if not rate_per_s > 0:
        raise WorkloadError(f"rate_per_s is {rate_per_s:g}")
    if not interval_cv >= 0:
        raise WorkloadError(f"interval_cv is {interval_cv:g}")
    drawn = list(islice(_arrivals(interval_cv, random), num_requests))
    if num_requests > 1 and not drawn[-1] > 0:
        raise WorkloadError(f"interval_cv is {interval_cv:g}: so much that no time passes")
    stretch = (num_requests - 1) / rate_per_s / (drawn[-1] or 1)
    return [at_s * stretch for at_s in drawn]


def _arrivals(interval_cv: float, random: Random) -> Iterator[float]:
    """Arrivals at a mean rate of one a second."""
    is_even = interval_cv < MIN_CV
    shape, at_s = (0.0 if is_even else interval_cv**-2), 0.0
    while True:
        yield at_s
        at_s += 1.0 if is_even else random.gammavariate(shape, 1 / shape)
