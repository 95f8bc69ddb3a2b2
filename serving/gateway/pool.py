"""The workers of a gateway: which are there, that they agree, and which of them takes a request.

Workers must serve the same checkpoint in the same dtype: otherwise a request's tokens would depend on where it ran. The
first to be there sets the measure; one that differs is logged, not routed to, and asked again later.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from moonshard.rpc import link_pb2
from moonshard.rpc.status import RequestError, Unavailable
from moonshard.serving.gateway.links import LOST_RETRY_AFTER_S, Session, WorkerLink
from moonshard.serving.router import Router


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLimits:
    """What every worker of the pool must agree on."""

    fingerprint: str
    dtype: str
    vocab_size: int
    max_context_tokens: int


def limits_of(welcome: link_pb2.Welcome) -> ModelLimits:
    return ModelLimits(
        fingerprint=welcome.fingerprint,
        dtype=welcome.dtype,
        vocab_size=welcome.vocab_size,
        max_context_tokens=welcome.max_context_tokens,
    )


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes."""

    worker_index: int
    session: Session


class LinkPool:
    """Links to `addresses`, and the tokens reserved on each. `on_load(index, load)` is called after every message."""

    def __init__(self, addresses: Sequence[str], *, on_load: Callable[[int, link_pb2.WorkerLoad], None]) -> None:
        epoch = secrets.token_bytes(16)
        self._on_load = on_load
        self._router = Router()
        self._ready, self._not_ready = asyncio.Event(), asyncio.Event()
        self._not_ready.set()
        self.links = tuple(
            WorkerLink(address, epoch=epoch, accept=self._mismatch, on_change=self._notice, on_load=self._link_loaded)
            for address in addresses
        )
        self._index = {link.address: index for index, link in enumerate(self.links)}

    @asynccontextmanager
    async def running(self):
        """Keep all links up inside the block."""
        tasks = [asyncio.create_task(link.run(), name=f"link {link.address}") for link in self.links]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def limits(self) -> ModelLimits | None:
        """None while no worker is there."""
        for link in self.links:
            if link.session is not None:
                return limits_of(link.session.welcome)
        return None

    @property
    def is_ready(self) -> bool:
        return bool(self._routable())

    async def wait_ready(self) -> None:
        await self._ready.wait()

    async def wait_not_ready(self) -> None:
        await self._not_ready.wait()

    def in_flight_tokens(self, address: str) -> int:
        return self._router.in_flight_tokens(address)

    @contextmanager
    def reserve(self, num_tokens: int) -> Iterator[Route]:
        """Hold `num_tokens` on the worker chosen for a request while the block runs. Unavailable without a worker."""
        reservation = self._router.reserve(self._routable(), num_tokens)
        if reservation is None:
            raise Unavailable("no worker is ready", retry_after_s=LOST_RETRY_AFTER_S)
        index = self._index[reservation.worker]
        session = self.links[index].session
        assert session is not None  # routable, and nothing was awaited since
        try:
            yield Route(index, session)
        finally:
            self._router.release(reservation)

    def fail_all(self, error: RequestError) -> None:
        for link in self.links:
            if link.session is not None:
                link.session.fail_all(error)

    def _routable(self) -> list[str]:
        return [link.address for link in self.links if link.session is not None and not link.session.load.draining]

    def _mismatch(self, welcome: link_pb2.Welcome) -> str | None:
        expected, found = self.limits, limits_of(welcome)
        if expected is None or expected == found:
            return None
        differing = [name for name in ModelLimits.__slots__ if getattr(expected, name) != getattr(found, name)]
        return "not routed to, its model differs from the other workers': " + ", ".join(
            f"{name} {getattr(found, name)!r} instead of {getattr(expected, name)!r}" for name in differing
        )

    def _link_loaded(self, link: WorkerLink) -> None:
        self._notice(link)  # `draining` may have begun or ended
        self._on_load(self._index[link.address], link.last_load)

    def _notice(self, _link: WorkerLink) -> None:
        became, was = (self._ready, self._not_ready) if self.is_ready else (self._not_ready, self._ready)
        became.set()
        was.clear()
