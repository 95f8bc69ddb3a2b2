"""First come, first served queues whose members time out, and when such a queue is full where each partition has one.

The scheduler's requests wait in such queues, and a decode worker's reservations.
"""

from collections import deque
from collections.abc import Iterator, Sequence


def is_full(num_waiting: Sequence[int], partition: int, max_waiting: int) -> bool:
    """Whether nobody more may wait for a partition, where `num_waiting` already wait for each.

    An equal share of the places is kept for each partition, so that one that is full stops nobody elsewhere.
    """
    share = -(-max_waiting // len(num_waiting))
    return sum(num_waiting) >= max_waiting and num_waiting[partition] >= share


class Fifo[T]:
    """A queue with a timeout. Iterates in the order of arrival."""

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._waiting: deque[tuple[T, float]] = deque()  # with when each came

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[T]:
        return (item for item, _ in self._waiting)

    def append(self, item: T, now_s: float) -> None:
        self._waiting.append((item, now_s))

    def head(self) -> T | None:
        return next(iter(self), None)

    def take_head(self) -> T:
        return self._waiting.popleft()[0]

    def head_wait_s(self, now_s: float) -> float:
        """How long the first has waited; 0 where nobody waits."""
        return now_s - self._waiting[0][1] if self._waiting else 0.0

    def remove(self, item: T) -> None:
        """Removes this very one; does nothing where it is not here."""
        for index, (waiting, _) in enumerate(self._waiting):
            if waiting is item:
                del self._waiting[index]
                return

    def expire(self, now_s: float) -> list[T]:
        """Removes and returns those who waited too long."""
        late: list[T] = []
        while self._waiting and self.head_wait_s(now_s) > self._timeout_s:
            late.append(self.take_head())
        return late
