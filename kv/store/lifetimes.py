"""How soon blocks are used again, by how often they were used and how long that is ago; and what keeping one yields.

A life table: of the blocks that came to an age without being used again, how many were used at that age. Ages are in
bins, two of which double them, and have no unit here. What is not seen any more was at risk until then: it is not taken
to be unused for ever. Old sights count less and less.

Hit density is the uses that are to be expected of a block, for the time that it takes room. It has room only as long as
that pays: of all ages at which it could be given up, the one with the most uses for the time counts. So a block whose
use is due later is not lost for waiting.
Source: Beckmann, Chen, Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density" (NSDI 2018), sections 3 and 4.
There a block takes room until the ages at which blocks happened to be evicted; the best age instead is Gittins' index
("Bandit Processes and Dynamic Allocation Indices", J. R. Stat. Soc. B 41, 1979).
"""

from collections.abc import Sequence

NUM_CLASSES = 4  # by uses: 0, 1, 2, and more
NUM_BINS = 56
_DECAY = 0.9
_PRIOR_BLOCKS = 4.0  # that were seen in every bin before any were
_PRIOR_CHANCE = 0.1  # of being used within a bin: the wider a bin, the less that is for the time


def bin_of(age: int) -> int:
    return min((age * age).bit_length(), NUM_BINS - 1)


def first_age(age_bin: int) -> float:
    """The age at which a bin begins."""
    return 2.0 ** ((age_bin - 1) / 2) if age_bin else 0.0


_WIDTHS = [first_age(age_bin + 1) - first_age(age_bin) for age_bin in range(NUM_BINS)]


class Lifetimes:
    """Of blocks of one class."""

    def __init__(self) -> None:
        self._used = [0.0] * NUM_BINS
        self._unseen = [0.0] * NUM_BINS

    def used(self, age: int, num_blocks: int = 1) -> None:
        """So many blocks were used again at that age."""
        self._used[bin_of(age)] += num_blocks

    def unseen(self, age: int, num_blocks: int = 1) -> None:
        """So many blocks were not used until that age, and nobody looks any longer."""
        self._unseen[bin_of(age)] += num_blocks

    def forget(self) -> None:
        """What was seen until now counts less."""
        for counts in (self._used, self._unseen):
            counts[:] = [count * _DECAY for count in counts]

    def densities(self) -> list[float]:
        """[bins]: uses for the time, for a block that came to a bin and is given up at the end of the best one."""
        chances = self._chances()
        return [_density(chances[start:], _WIDTHS[start:]) for start in range(NUM_BINS)]

    def _chances(self) -> list[float]:
        """[bins]: of being used within a bin, for a block that came to it."""
        chances, at_risk = list[float](), _PRIOR_BLOCKS
        for used, unseen in zip(reversed(self._used), reversed(self._unseen), strict=True):
            at_risk += used + unseen
            chances.append((used + _PRIOR_BLOCKS * _PRIOR_CHANCE) / at_risk)
        return chances[::-1]


def _density(chances: Sequence[float], widths: Sequence[float]) -> float:
    """Of a block at the beginning of the first of these bins. Uses are in the middle of a bin."""
    best, uses, time, left = 0.0, 0.0, 0.0, 1.0
    for chance, width in zip(chances, widths, strict=True):
        uses += left * chance
        time += left * width * (1 - chance / 2)
        left *= 1 - chance
        if uses > best * time:
            best = uses / time
    return best
