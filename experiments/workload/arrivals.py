"""When requests come: at random with a rate, in bursts, or each when another has gone.

Source: gamma intervals and their coefficient of variation as in BurstGPT (arXiv 2401.17644) and vLLM's benchmark
(`--burstiness`); with 1 they are Poisson's.
"""

from collections.abc import Iterator
from random import Random

from moonshard.experiments.workload.plan import WorkloadError


def poisson(rate_per_s: float, random: Random) -> Iterator[float]:
    """Seconds from the beginning, without end."""
    return gamma(rate_per_s, 1.0, random)


def gamma(rate_per_s: float, variation: float, random: Random) -> Iterator[float]:
    """Intervals of mean 1 / rate; `variation` is their standard deviation by their mean. 0: one every so often."""
    if not rate_per_s > 0:
        raise WorkloadError(f"rate_per_s is {rate_per_s:g}")
    if not variation >= 0:
        raise WorkloadError(f"variation is {variation:g}")
    return _gamma(rate_per_s, variation, random)


def _gamma(rate_per_s: float, variation: float, random: Random) -> Iterator[float]:
    shape, at_s = (variation**-2 if variation else 0.0), 0.0
    while True:
        yield at_s
        at_s += random.gammavariate(shape, 1 / (shape * rate_per_s)) if variation else 1 / rate_per_s
