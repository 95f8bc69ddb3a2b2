"""What a trial of sizes holds, and what is asked for: plain records, for the process that measures and the table."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SizesJob:
    overrides: tuple[str, ...]  # the whole configuration
    repeats: int
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """One candidate for an entry, and its times. Those of an entry took turns."""

    entry: str
    candidate: float
    is_current: bool  # what the table has
    ms: dict[str, float]  # by probe: the median
    longest_step_ms: float  # of any probe: what a neighbour that decodes waits for

    @property
    def total_ms(self) -> float:
        return sum(self.ms.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedSizes:
    kind: str  # of machine
    tried: tuple[Tried, ...]  # those of an entry follow one another
