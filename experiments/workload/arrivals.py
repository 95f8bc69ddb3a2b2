"""When requests come: at random with a rate, in bursts, or each when another has gone.

Gamma intervals as in BurstGPT (arXiv 2401.17644), told by their coefficient of variation: 1 is Poisson's process,
less is steadier, more is bursts. `--burstiness` of vLLM's benchmark is the gamma distribution's shape instead, which is
interval_cv ** -2.
"""

from collections.abc import Iterator
from random import Random

from moonshard.experiments.workload.plan import WorkloadError


def arrivals(rate_per_s: float, interval_cv: float, random: Random) -> Iterator[float]:
    """Seconds from the beginning, without end; intervals have the mean 1 / rate, and with cv 0 all are the same."""
    if not rate_per_s > 0:
        raise WorkloadError(f"rate_per_s is {rate_per_s:g}")
    if not interval_cv >= 0:
        raise WorkloadError(f"interval_cv is {interval_cv:g}")
    return _arrivals(rate_per_s, interval_cv, random)


def _arrivals(rate_per_s: float, interval_cv: float, random: Random) -> Iterator[float]:
    shape, at_s = (interval_cv**-2 if interval_cv else 0.0), 0.0
    while True:
        yield at_s
        at_s += random.gammavariate(shape, 1 / (shape * rate_per_s)) if interval_cv else 1 / rate_per_s
