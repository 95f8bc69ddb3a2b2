"""Whether a figure keeps to a bar, by its interval. Pure."""

from typing import Literal

from moonshard.experiments.common.intervals import Interval

type Verdict = Literal["held", "missed", "open"]


def judged(found: Interval, *, at_least: float) -> Verdict:
    """Whether the bar is held, missed or open (the interval contains it). Without an interval the figure decides."""
    low, high = (found.value if bound is None else bound for bound in (found.low, found.high))
    return "held" if low >= at_least else "missed" if high < at_least else "open"


def told(found: Interval) -> str:
    """The figure as text, with its interval, or a word that there is none."""
    if found.low is None or found.high is None:
        return f"{found.value:.2f} (one repeat, no interval)"
    return f"{found.value:.2f} (95% interval {found.low:.2f} to {found.high:.2f}, {found.num_repeats} repeats)"
