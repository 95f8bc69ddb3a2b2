"""Who waits for a slot with its KV already in place: requests whose prompt was prefilled elsewhere.

A landed request holds the blocks of its prompt in this partition and lacks only a slot there, unlike the members of the
waiting line (`queue`), which hold nothing. It arrives once and may give way once; then it is a sequence like any other.
Only its leading choice is listed here: the others wait until that one has a slot. Who gets a slot is decided in
`admission`.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from moonshard.kv.blocks import BlockPool
from moonshard.serving.control.batching.sequence import Accepted, Sequence


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class LandedRequest:
    """A request's first choice that goes on, and its blocks, with all of the prompt that it still sees."""

    leader: Sequence
    blocks: tuple[int, ...]

    @property
    def num_sequences(self) -> int:
        return 1 + len(self.leader.accepted.to_fork)


class LandedRequests:
    """Iterates in their order, over a copy, so that members may leave meanwhile."""

    def __init__(self, pool: BlockPool, partition: int):
        self._pool = pool
        self._partition = partition
        self._landed: list[LandedRequest] = []  # in the order of their leaders

    def __iter__(self) -> Iterator[LandedRequest]:
        return iter(tuple(self._landed))

    @property
    def has_any(self) -> bool:
        return bool(self._landed)

    def append(self, landed_request: LandedRequest) -> None:
        insort(self._landed, landed_request, key=lambda one: one.leader.order)

    def take(self, landed_request: LandedRequest) -> None:
        """Removes it; the caller takes over its blocks."""
        self._landed.remove(landed_request)

    def release(self, landed_request: LandedRequest) -> None:
        """Removes it and gives its blocks back. No launched step uses them: what wrote them came before."""
        self._landed.remove(landed_request)
        self._pool.release(self._partition, landed_request.blocks[::-1])

    @property
    def num_blocks_to_grow(self) -> int:
        """How many blocks their sequences take, if each goes on by one column."""
        return sum(one.num_sequences * self._pool.num_blocks_to_grow(len(one.blocks)) for one in self._landed)

    def remove(self, accepted: Accepted) -> None:
        """Removes everything of one request; does nothing where the request is not here."""
        for landed_request in self:
            if landed_request.leader.accepted is accepted:
                self.release(landed_request)
