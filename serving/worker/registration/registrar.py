"""Keeps a worker registered with every gateway of `worker.gateways`, whichever these are from one look to the next.

A name may stand for several gateways, and for others later, as that of a headless Service in Kubernetes does. A gateway
that the name no longer stands for is left once the registration with it breaks off, and not before: names are slow to
tell the truth, a stream that works is the truth.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from moonshard.rpc import link_pb2
from moonshard.serving.worker.registration.announcer import GOODBYE_S, Announcer, Credentials
from moonshard.serving.worker.registration.places import Place, resolve

LOOK_S = 5.0  # from one look at the names to the next

logger = logging.getLogger(__name__)

type Resolve = Callable[[str], Awaitable[frozenset[Place]]]


class Registrar:
    """Registers the worker of `announced` with the gateways at the `host:port`s of `gateways`. `on_taken` hears, again
    and again, of one that reaches another process at the worker's address.
    """

    def __init__(
        self,
        gateways: Sequence[str],
        announced: link_pb2.Announcement,
        credentials: Credentials,
        on_taken: Callable[[str], None],
        *,
        resolve: Resolve = resolve,
        look_s: float = LOOK_S,
    ) -> None:
        self._announced = announced
        self._credentials = credentials
        self._on_taken = on_taken
        self._resolve = resolve
        self._look_s = look_s
        self._found: dict[str, frozenset[Place]] = {gateway: frozenset() for gateway in gateways}
        self._troubles: dict[str, str] = {}
        self._announcers: dict[Place, Announcer] = {}
        self._tasks: dict[Place, asyncio.Task[None]] = {}
        self._leaving = asyncio.Event()

    @property
    def registered(self) -> frozenset[Place]:
        """The gateways that know of the worker."""
        return frozenset(place for place, announcer in self._announcers.items() if announcer.is_registered)

    async def run(self) -> None:
        """Until cancelled; `leave` then ends what is registered."""
        while True:
            await asyncio.gather(*map(self._look_up, self._found))
            self._follow(frozenset().union(*self._found.values()))
            await asyncio.sleep(self._look_s)

    async def leave(self) -> None:
        """Says goodbye to all, and waits a moment for them to hear it."""
        self._leaving.set()
        for place, task in self._tasks.items():
            if not self._announcers[place].is_registered:
                task.cancel()
        tasks = tuple(self._tasks.values())
        if tasks:
            await asyncio.wait(tasks, timeout=2 * GOODBYE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_up(self, gateway: str) -> None:
        """A name that cannot be looked up now stands for what it stood for before; said once."""
        try:
            self._found[gateway] = await self._resolve(gateway)
            self._troubles.pop(gateway, None)
        except (OSError, UnicodeError) as error:  # of a name that no resolver is asked for
            trouble = getattr(error, "strerror", None) or str(error)
            if self._troubles.get(gateway) != trouble:
                logger.warning("worker.gateways: %s cannot be looked up: %s", gateway, trouble)
            self._troubles[gateway] = trouble

    def _follow(self, wanted: frozenset[Place]) -> None:
        for place in wanted - self._tasks.keys():
            self._announcers[place] = Announcer(place, self._announced, self._credentials, self._on_taken)
            self._tasks[place] = asyncio.create_task(self._announcers[place].run(self._leaving))
        for place in self._tasks.keys() - wanted:
            if not self._announcers[place].is_registered:
                self._tasks.pop(place).cancel()
                del self._announcers[place]


@asynccontextmanager
async def registered(registrar: Registrar) -> AsyncIterator[None]:
    """Gateways know of the worker inside the block, and are told when it ends."""
    running = asyncio.create_task(registrar.run(), name="registrar")
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await registrar.leave()
