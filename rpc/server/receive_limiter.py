"""How many request messages are received at a time, since each may take as much memory as a message can.

Nothing is known of a gRPC message until it is whole. But one that was sent arrives within milliseconds, so nobody has
to wait in line: every message is received at once, and where there are too many, those that have been arriving for
longest have only a short time left. HTTP bodies have other bounds (`serving.gateway.intake`), as their bytes are
counted while they arrive.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from moonshard.rpc.status import RequestTimeout


@dataclass(slots=True, eq=False)  # itself is what counts
class _Receipt:
    begun_s: float  # by the loop's clock
    timeout: asyncio.Timeout


class ReceiveLimiter:
    """`max_patient` may take `timeout_s`; of more, the oldest only `hurried_timeout_s`. Runs on one event loop.

    What is held is bounded: by as many messages of the largest size, and by what the network brings in
    `hurried_timeout_s`.
    """

    def __init__(self, max_patient: int, *, timeout_s: float, hurried_timeout_s: float) -> None:
        self._max_patient = max_patient
        self._timeout_s = timeout_s
        self._hurried_timeout_s = hurried_timeout_s
        self._patient: dict[_Receipt, None] = {}  # the oldest first
        self._hurried: dict[_Receipt, None] = {}  # whoever was hurried last comes last

    @contextlib.asynccontextmanager
    async def receiving(self) -> AsyncIterator[None]:
        """The block receives one message. RequestTimeout where that takes too long."""
        receipt = _Receipt(asyncio.get_running_loop().time(), asyncio.timeout(self._timeout_s))
        try:
            async with receipt.timeout:
                self._enter(receipt)
                try:
                    yield
                finally:
                    self._leave(receipt)
        except TimeoutError:
            if not receipt.timeout.expired():
                raise
            raise RequestTimeout("the message took too long to arrive") from None

    def _enter(self, receipt: _Receipt) -> None:
        self._patient[receipt] = None
        if len(self._patient) > self._max_patient:
            oldest = next(iter(self._patient))
            del self._patient[oldest]
            self._hurried[oldest] = None
            self._give(oldest, self._hurried_timeout_s)

    def _leave(self, receipt: _Receipt) -> None:
        """Ends a receipt. Where there is room again, the one that was hurried last gets its full time back."""
        self._hurried.pop(receipt, None)
        self._patient.pop(receipt, None)
        if self._hurried and len(self._patient) < self._max_patient:
            last, _ = self._hurried.popitem()
            self._patient = {last: None, **self._patient}
            self._give(last, self._timeout_s)

    @staticmethod
    def _give(receipt: _Receipt, timeout_s: float) -> None:
        if not receipt.timeout.expired():
            receipt.timeout.reschedule(max(asyncio.get_running_loop().time(), receipt.begun_s + timeout_s))
