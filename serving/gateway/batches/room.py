"""Whether a further line may be begun: only where the workers would else have nothing to do.

Lines come behind all other requests in every queue; here they are kept from filling the slots too, which nobody who
runs gives up for one who comes. So as many lines are open as slots are left by others, and two more for each worker to
be at hand; none is begun while requests wait for their first token. Where others keep all slots busy, batches wait.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from moonshard.serving.control.members.fleet import DECODE_ROLES
from moonshard.serving.gateway.pipeline.generation import Gateway

AHEAD_PER_WORKER = 2
LOOK_S = 0.5  # workers that come and slots that others leave elsewhere are noticed so late


class Room:
    """The lines that are open in one gateway. Who waits is served in turn."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()
        self._num_open = 0
        gateway.on_change = self._changed.set

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Waits for a place, and has it during the block."""
        async with self._turn:
            while not self._is_free():
                self._changed.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), LOOK_S)
            self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
            self._changed.set()

    def _is_free(self) -> bool:
        gateway = self._gateway
        if not gateway.is_ready:
            return False
        sessions = [link.session for link in gateway.pool.links if link.session is not None]
        num_slots = sum(session.welcome.max_slots for session in sessions if session.role in DECODE_ROLES)
        num_ahead = AHEAD_PER_WORKER * len(sessions)
        num_running = max(gateway.num_running, self._num_open)
        return num_running < num_slots + num_ahead and gateway.num_waiting < num_ahead
