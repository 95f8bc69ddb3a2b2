"""Who waits for a slot, in which order, and who is turned away.

There are two lines, served as one, the most important first and of these the oldest: the sequences that come back
(preempted, too many to fork, or resumed from another worker), and the queue of requests that were never admitted, which
alone is bounded and alone expires. Nobody grows more important by waiting: where more important ones never cease to
come, the others wait until they expire. Whether there is room is decided in `admission`; requests whose KV is in place
wait in `landed`.
"""

from bisect import insort
from collections.abc import Iterator, Mapping
from heapq import merge

from moonshard.kv.blocks import BlockPool
from moonshard.serving.control.batching.sequence import Accepted, Sequence, finish_reason
from moonshard.serving.control.fifo import Fifo
from moonshard.serving.control.request import Request


class Rejected(Exception):
    """A request that this worker does not serve."""

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message


class NeverFits(Rejected):
    """The request can never be served as asked; `field` is the part of it that is at fault."""

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
    capacity_tokens = pool.num_tokens_in(pool.blocks_per_partition, max_context_tokens)
    if num_tokens > capacity_tokens:
        field = "prompt" if len(request.prompt) >= capacity_tokens else "max_tokens"
        raise NeverFits(field, f"prompt and max_tokens are {num_tokens} tokens, {capacity_tokens} fit")


def check_resumed(request: Request, resumed: Mapping[int, tuple[int, ...]]) -> None:
    """Raises NeverFits where the tokens generated elsewhere leave nothing to go on with."""
    if not resumed:
        raise NeverFits("resumed", "no choice goes on")
    for choice, tokens in resumed.items():
        if not 0 <= choice < request.n:
            raise NeverFits("resumed", f"there is no choice {choice} of {request.n}")
        if any(finish_reason(request, token, count) for count, token in enumerate(tokens, start=1)):
            raise NeverFits("resumed", f"choice {choice} ends within its {len(tokens)} tokens")


class WaitingLine:
    """The order in which the sequences of a partition are admitted."""

    def __init__(self, queue_timeout_s: float):
        self._queue_timeout_s = queue_timeout_s
        self._returning: list[Sequence] = []  # in their order
        self._queue = Fifo[Accepted](queue_timeout_s)  # whose leader was never admitted, oldest first
        self._leaders: list[Sequence] = []  # of the queue, in their order
        self._aside = set[bytes]()  # requests that keep their place, and are not admitted for now

    @property
    def num_tokens(self) -> int:
        """Tokens to be prefilled for everyone here, as far as was known when they came.

        Choices that will be forked from their leader need none.
        """
        if not self._returning and not self._queue:
            return 0
        queued = sum(len(accepted.request.prompt) - accepted.num_known_tokens for accepted in self._queue)
        return queued + sum(sequence.num_tokens for sequence in self._returning)

    @property
    def num_queued(self) -> int:
        """How many requests wait that were never admitted."""
        return len(self._queue)

    def head_wait_s(self, now_s: float) -> float:
        """How long the first of those who were never admitted has waited; 0 where there is none."""
        return self._queue.head_wait_s(now_s)

    def append(self, accepted: Accepted, now_s: float) -> None:
        self._queue.append(accepted, now_s)
        insort(self._leaders, accepted.leader, key=lambda sequence: sequence.order)

    def come_back(self, sequence: Sequence) -> None:
        insort(self._returning, sequence, key=lambda sequence: sequence.order)

    def __iter__(self) -> Iterator[Sequence]:
        """The sequences that may be admitted, in their order. Of a request that was never admitted only the leader is
        among them.
        """
        ordered = merge(self._returning, self._leaders, key=lambda sequence: sequence.order)
        if not self._aside:
            return ordered
        return (sequence for sequence in ordered if sequence.request.id not in self._aside)

    def head(self) -> Sequence | None:
        """The first here, whose turn it is."""
        if not self._returning and not self._queue:  # nearly every step finds it so
            return None
        return next(iter(self), None)

    def set_aside(self, request_id: bytes) -> None:
        """Nobody of this request is admitted until `take_back`; all keep their places."""
        self._aside.add(request_id)

    def take_back(self, request_id: bytes) -> None:
        self._aside.discard(request_id)

    def take(self, sequence: Sequence) -> None:
        """Removes a sequence that was admitted."""
        if sequence in self._returning:
            self._returning.remove(sequence)
        else:
            self._leave_queue(sequence.accepted)

    def remove(self, accepted: Accepted) -> None:
        """Removes everything of one request; does nothing where the request is not here."""
        if accepted.leader in self._leaders:
            self._leave_queue(accepted)
        self._returning = [sequence for sequence in self._returning if sequence.accepted is not accepted]

    def expire(self, now_s: float) -> list[tuple[bytes, QueueTimeout]]:
        """Takes out the requests that waited too long for their first admission. Whoever once ran never expires."""
        if not self._queue:
            return []
        error = QueueTimeout(retry_after_s=self._queue_timeout_s)
        late = self._queue.expire(now_s)
        for accepted in late:
            self._leaders.remove(accepted.leader)
        return [(accepted.request.id, error) for accepted in late]

    def _leave_queue(self, accepted: Accepted) -> None:
        self._queue.remove(accepted)
        self._leaders.remove(accepted.leader)
