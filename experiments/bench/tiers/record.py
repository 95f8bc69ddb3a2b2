"""What is asked of the process that measures tiers, and what it found."""

from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, kw_only=True, slots=True)
class TiersJob:
    overrides: tuple[str, ...]  # the whole configuration
    folder: str  # for files; what is written there is deleted
    num_blocks: tuple[int, ...]  # of one call
    repeats: int
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """One way of moving so many blocks in one call. Seconds, a sample for each repeat."""

    way: str
    num_blocks: int
    put_s: tuple[float, ...]
    get_s: tuple[float, ...]  # of what was just put

    @property
    def median_get_s(self) -> float:
        return median(self.get_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class TierTimes:
    block_tokens: int
    block_bytes: int
    moved: tuple[Moved, ...]
    land_s: dict[int, tuple[float, ...]]  # into the device's pages, by number of blocks
    compute_s: dict[int, tuple[float, ...]]  # a prompt of so many blocks, prefilled from nothing
