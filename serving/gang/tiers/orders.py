"""What the leader orders of one member's tiers, and who waits for its answers.

Which answers come late is left to those who ask, as with tiers of one's own: a disk or a network may hang, and no gang
ends for that.
"""

import asyncio
from collections.abc import Callable

from moonshard.rpc import link_pb2
from moonshard.serving.gang.members import GangFault


class TierOrders:
    """What one member is ordered, numbered. `tell` sends, in the order of the calls. On the event loop."""

    def __init__(self, member: int, tell: Callable[[link_pb2.TierOrder], None]):
        self._member = member
        self._tell = tell
        self._num_told = 0
        self._asked = dict[int, asyncio.Future[link_pb2.TierAnswer]]()

    def tell(self, order: link_pb2.TierOrder) -> None:
        """An order that nobody answers."""
        order.number = self._num_told
        self._num_told += 1
        self._tell(order)

    def ask(self, order: link_pb2.TierOrder) -> "asyncio.Future[link_pb2.TierAnswer]":
        answered = self._asked[self._num_told] = asyncio.get_running_loop().create_future()
        self.tell(order)
        return answered

    def answered(self, answer: link_pb2.TierAnswer) -> None:
        """GangFault for an answer that nobody waits for."""
        asked = self._asked.pop(answer.number, None)
        if asked is None:
            raise GangFault(f"member {self._member} of the gang answers order {answer.number}, which it was not asked")
        if not asked.done():
            asked.set_result(answer)
