"""What the leader orders of its followers besides steps, numbered, and what they answer: all must, or the gang ends.

An order is told before `ask` returns, to all in the same order, on the stream that steps are told on. Who does not
answer is noticed as in `watch`, by looks; but a write may take as long as its transport gives it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from moonshard.rpc import link_pb2
from moonshard.serving.gang.members import GangFault
from moonshard.serving.gang.watch import KEY, LOOKS_PER_TIMEOUT

Answers = list[link_pb2.FollowerAnswer]  # in the order of the members


@dataclass(slots=True)
class _Asked:
    may_last: bool
    future: asyncio.Future[Answers]
    answers: dict[int, link_pb2.FollowerAnswer] = field(default_factory=dict[int, link_pb2.FollowerAnswer])
    num_looks: int = 0  # since a member that it waits for has answered anything


class Orders:
    """The orders of one gang. On the event loop."""

    def __init__(self, num_members: int, tell: Callable[[link_pb2.GangOrder], None]):
        self._members = range(1, num_members)
        self._tell = tell
        self._num_told = 0
        self._asked: dict[int, _Asked] = {}

    def tell(self, order: link_pb2.GangOrder) -> None:
        """An order that nobody answers."""
        order.number = self._num_told
        self._num_told += 1
        self._tell(order)

    def ask(self, order: link_pb2.GangOrder) -> asyncio.Future[Answers]:
        """All answers, once they are there."""
        future: asyncio.Future[Answers] = asyncio.get_running_loop().create_future()
        self._asked[self._num_told] = _Asked(order.WhichOneof("what") == "publish", future)
        self.tell(order)
        return future

    def answered(self, member: int, answer: link_pb2.FollowerAnswer) -> None:
        """GangFault for an answer that nobody waits for."""
        asked = self._asked.get(answer.number)
        if asked is None or member in asked.answers:
            raise GangFault(f"member {member} of the gang answers order {answer.number}, which it was not asked")
        asked.answers[member] = answer
        for other in self._asked.values():  # which wait behind it on that member
            if member not in other.answers:
                other.num_looks = 0
        if len(asked.answers) == len(self._members):
            del self._asked[answer.number]
            if not asked.future.done():
                asked.future.set_result([asked.answers[member] for member in self._members])

    def look(self, timeout_s: float) -> str | None:
        """To be called as `Watched.look` is. What is wrong, in words."""
        for asked in self._asked.values():
            asked.num_looks += 1
            if asked.num_looks > LOOKS_PER_TIMEOUT and not asked.may_last:
                missing = ", ".join(str(member) for member in self._members if member not in asked.answers)
                return f"member {missing} of the gang did not carry out an order in {timeout_s:g} s ({KEY})"
        return None
