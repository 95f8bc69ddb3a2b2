"""Who waits for a slot with its KV already in place: requests whose prompt was prefilled elsewhere.

Stands apart from the waiting line, whose members hold nothing: a joiner holds the blocks of its prompt in this
partition and lacks only a slot there. It arrives once and may give way once; then it is a sequence like any other. Left
out: who gets the slot, and the other choices, which wait with their request until the leader is seated.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from moonshard.kv.blocks import BlockPool
from moonshard.serving.control.batching.sequence import Accepted, Sequence


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Joiner:
    """A request's first choice that goes on, and the blocks that hold its whole prompt."""

    leader: Sequence
    blocks: tuple[int, ...]

    @property
    def num_sequences(self) -> int:
        return 1 + len(self.leader.accepted.to_fork)


class Joiners:
    """Iterates oldest first, over a copy, so that members may leave meanwhile."""

    def __init__(self, pool: BlockPool, partition: int):
        self._pool = pool
        self._partition = partition
        self._joiners: list[Joiner] = []  # in the order of their arrival

    def __iter__(self) -> Iterator[Joiner]:
        return iter(tuple(self._joiners))

    def append(self, joiner: Joiner) -> None:
        self._joiners.append(joiner)

    def take(self, joiner: Joiner) -> None:
        """It leaves with its blocks."""
        self._joiners.remove(joiner)

    def release(self, joiner: Joiner) -> None:
        """It leaves without its blocks. No launched step uses them: what wrote them came before."""
        self._joiners.remove(joiner)
        self._pool.release(self._partition, joiner.blocks[::-1])

    def remove(self, accepted: Accepted) -> None:
        """Everything of one request, which need not be here."""
        for joiner in self:
            if joiner.leader.accepted is accepted:
                self.release(joiner)
