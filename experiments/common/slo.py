"""Service level objectives: what each request should keep to."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

PositiveMs = Annotated[float, Meta(gt=0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """The objectives that each request should keep to. None: no objective of that kind."""

    ttft_ms: PositiveMs | None = None
    tpot_ms: PositiveMs | None = None  # the mean of a request's gaps between tokens
    max_itl_ms: PositiveMs | None = None  # none of a request's gaps is longer
    attainment: Annotated[float, Meta(gt=0, le=1)] = 0.9  # of DistServe's goodput
