"""From a sweep to points, and from points to trials in the order in which they run. Pure.

Points are listed, or made of lists of values, each combined with each; where there is both, each listed one is combined
with all of those. Repeats are interleaved, so that what else happens on the machine hits all points alike.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from moonshard.experiments.common.flat import Flat


@dataclass(frozen=True, order=True, slots=True)
class Trial:
    """One repeat of one point; both count from 0."""

    repeat: int
    point: int

    @property
    def name(self) -> str:
        """The name of the trial's folder."""
        return f"point-{self.point:03}-repeat-{self.repeat}"


def expand(sweep: Mapping[str, Sequence[object]], listed: Sequence[Flat]) -> list[Flat]:
    """What each point sets. One point that sets nothing where there is neither a sweep nor a list.

    Raises:
        ValueError: a key without a value, one that is swept and listed too, or two points that are the same.
    """
    for key, values in sweep.items():
        if not values:
            raise ValueError(f"sweep.{key}: no values")
        if any(key in point for point in listed):
            raise ValueError(f"sweep.{key}: the listed points set it too")
    swept = [dict(zip(sweep, values, strict=True)) for values in product(*sweep.values())]
    points = [point | values for point in listed or [{}] for values in swept]
    for index, point in enumerate(points):
        if point in points[:index]:
            raise ValueError(f"points {points.index(point)} and {index} are the same: {label(point)}")
    return points


def label(swept: Mapping[str, object]) -> str:
    """A point's name for people: its keys and values, with table names only where keys would be ambiguous."""
    last = [key.rpartition(".")[2] for key in swept]
    names = [name if last.count(name) == 1 else key for key, name in zip(swept, last, strict=True)]
    return (
        " ".join(f"{name}={_short(value)}" for name, value in zip(names, swept.values(), strict=True))
        or "as configured"
    )


def interleaved(num_points: int, repeats: int) -> Iterator[Trial]:
    """The trials: the first repeat of all points, then the second of all."""
    return (Trial(repeat=repeat, point=point) for repeat in range(repeats) for point in range(num_points))


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
