"""Who waits for a slot, in which order, and who is turned away.

Stands apart from the scheduler because its rules are about requests and time, not about steps. Two lines, served as
one: sequences that come back (preempted, or too many to fork) stand before the requests that were never admitted.
Whoever comes back arrived before everyone in the queue, since the queue is never overtaken. Left out: whether there is
room.
"""

from bisect import insort
from collections import deque
from contextlib import suppress

from moonshard.kv.blocks import BlockPool
from moonshard.serving.request import Request
from moonshard.serving.sequence import Accepted, Sequence


class Rejected(Exception):
    """A request that this worker does not serve."""

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message


class NeverFits(Rejected):
    """As asked, the request can never be served; `field` of the request says why."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


class QueueFull(Rejected):
    def __init__(self, retry_after_s: float):
        super().__init__("the queue is full")
        self.retry_after_s = retry_after_s


class QueueTimeout(Rejected):
    def __init__(self, retry_after_s: float):
        super().__init__(f"no room within {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


def check_fits(request: Request, max_context_tokens: int, pool: BlockPool) -> None:
    """Raises NeverFits where even an empty worker could not run one choice to its last token."""
    if not request.prompt:
        raise NeverFits("prompt", "the prompt is empty")
    if request.max_tokens < 1:
        raise NeverFits("max_tokens", f"max_tokens is {request.max_tokens}, at least 1 is needed")
    if request.n < 1:
        raise NeverFits("n", f"n is {request.n}, at least 1 is needed")
    num_tokens = len(request.prompt) + request.max_tokens
    capacity_tokens = min(max_context_tokens, pool.blocks_per_partition * pool.block_size)
    if num_tokens > capacity_tokens:
        field = "prompt" if len(request.prompt) >= capacity_tokens else "max_tokens"
        raise NeverFits(field, f"prompt and max_tokens are {num_tokens} tokens, {capacity_tokens} fit")


class WaitingLine:
    """The order in which sequences are admitted."""

    def __init__(self, max_queued_requests: int, queue_timeout_s: float):
        self._max_queued_requests = max_queued_requests
        self._queue_timeout_s = queue_timeout_s
        self._returning: list[Sequence] = []  # oldest first
        self._queue: deque[Accepted] = deque()  # whose leader was never admitted

    @property
    def num_tokens(self) -> int:
        """Tokens to be prefilled for everyone here; choices that will be forked need none."""
        queued = sum(len(accepted.request.prompt) for accepted in self._queue)
        return queued + sum(sequence.num_tokens for sequence in self._returning)

    def check_room(self, now_s: float) -> None:
        """Raises QueueFull. The head's wait so far is the best guess at how long a place in this queue takes."""
        if len(self._queue) >= self._max_queued_requests:
            raise QueueFull(retry_after_s=max(1.0, now_s - self._queue[0].added_s))

    def append(self, accepted: Accepted) -> None:
        self._queue.append(accepted)

    def come_back(self, sequence: Sequence) -> None:
        insort(self._returning, sequence, key=lambda sequence: sequence.order)

    def head(self) -> Sequence | None:
        """Whose turn it is: of a request never admitted, the leader."""
        if self._returning:
            return self._returning[0]
        return self._queue[0].leader if self._queue else None

    def pop(self) -> None:
        """The head was admitted."""
        if self._returning:
            del self._returning[0]
        else:
            self._queue.popleft()

    def remove(self, accepted: Accepted) -> None:
        """Everything of one request, which need not be here."""
        with suppress(ValueError):
            self._queue.remove(accepted)
        self._returning = [sequence for sequence in self._returning if sequence.accepted is not accepted]

    def expire(self, now_s: float) -> list[tuple[bytes, QueueTimeout]]:
        """Takes out the requests that waited too long for their first admission. Whoever once ran never expires."""
        expired = []
        while self._queue and now_s - self._queue[0].added_s > self._queue_timeout_s:
            request_id = self._queue.popleft().request.id
            expired.append((request_id, QueueTimeout(retry_after_s=self._queue_timeout_s)))
        return expired
