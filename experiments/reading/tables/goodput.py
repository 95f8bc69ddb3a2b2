"""Which requests meet their objectives, and the goodput that comes of it. Pure.

Source: DistServe (OSDI'24), section 2: goodput is the highest request rate at which so large a share of requests, the
attainment, meets all objectives at once. Nothing is interpolated between the rates that were measured.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moonshard.experiments.common.slo import Slo


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """The latencies of one request. No TTFT: it failed. No TPOT and gaps: it had one token."""

    ttft_ms: float | None
    tpot_ms: float | None = None
    max_itl_ms: float | None = None  # its longest gap


@dataclass(frozen=True, kw_only=True, slots=True)
class Offered:
    """An offered rate, and the share of its requests that met all objectives."""

    rate_per_s: float
    attained: float


def meets(slo: Slo, request: Latency) -> bool:
    """Whether a request meets all objectives; a failed one never does."""
    if request.ttft_ms is None:
        return False
    pairs = ((request.ttft_ms, slo.ttft_ms), (request.tpot_ms, slo.tpot_ms), (request.max_itl_ms, slo.max_itl_ms))
    return all(value is None or bound is None or value <= bound for value, bound in pairs)


def attained(slo: Slo, requests: Sequence[Latency]) -> float:
    """The share of all sent requests that met them. ValueError for none."""
    if not requests:
        raise ValueError("no requests")
    return sum(meets(slo, request) for request in requests) / len(requests)


def goodput(loads: Iterable[Offered], attainment: float) -> float | None:
    """The highest measured rate at which enough requests meet them; None where there is no such rate."""
    return max((load.rate_per_s for load in loads if load.attained >= attainment), default=None)
