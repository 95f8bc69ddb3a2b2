"""Clients of engines in their own process: requests sent open loop or one by one, and what is heard of each, stamped.

They know neither what the engines are nor how many there are. Nothing lies between a client and an engine.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from moonshard.serving.control.request import Request
from moonshard.serving.engine.engine import Engine
from moonshard.serving.engine.events import StepReport

MAX_RUN_S = 300.0  # of requests that are served in seconds: beyond it one is lost
type Hear = Callable[[StepReport], None]
type Build = Callable[[Hear], Arrangement]


class Stuck(Exception):
    """Raised for requests that got no answer."""


@dataclass(eq=False, slots=True)
class Heard:
    """One request as its client sees it. Times are of `perf_counter_ns`."""

    request: Request
    due_ns: int  # when it was to be sent; that it was late is the server's time
    tokens: list[int] = field(default_factory=list)
    arrivals_ns: list[int] = field(default_factory=list)  # of each token, on the event loop

    @property
    def is_whole(self) -> bool:
        return len(self.tokens) == self.request.max_tokens

    @property
    def ttft_ms(self) -> float:
        return (self.arrivals_ns[0] - self.due_ns) / 1e6

    @property
    def gaps_ms(self) -> list[float]:
        """The times between its tokens. With two engines the first gap is the handoff."""
        return [(after - before) / 1e6 for before, after in pairwise(self.arrivals_ns)]


class Arrangement(Protocol):
    """One or two engines that requests are sent to; `hear` is told of all that they emit."""

    @property
    def engines(self) -> tuple[Engine, ...]: ...

    def submit(self, request: Request) -> None: ...


class Clients:
    """The clients of one run: which request is due when, and what each of them has heard."""

    def __init__(self) -> None:
        self.heard: dict[bytes, Heard] = {}
        self.all_whole = asyncio.Event()
        self._num_whole = 0

    def add(self, request: Request, due_ns: int) -> None:
        self.heard[request.id] = Heard(request, due_ns)
        self.all_whole.clear()

    def hear(self, report: StepReport) -> None:
        now_ns = time.perf_counter_ns()
        for emitted in report.emitted:
            heard = self.heard[emitted.output.sequence.request_id]
            heard.tokens += emitted.output.token_ids
            heard.arrivals_ns.append(now_ns)
            self._num_whole += heard.is_whole
        if self._num_whole == len(self.heard):
            self.all_whole.set()


async def serve(build: Build, arrivals: Sequence[tuple[float, Request]]) -> list[Heard]:
    """Open loop: each request is sent so many seconds after the start, whatever became of those before it.

    Raises Stuck, or what failed an engine.
    """
    clients = Clients()
    async with _running(build(clients.hear)) as arrangement:
        start_ns = time.perf_counter_ns()
        for at_s, request in arrivals:
            due_ns = start_ns + int(at_s * 1e9)
            await asyncio.sleep((due_ns - time.perf_counter_ns()) / 1e9)
            clients.add(request, due_ns)
            arrangement.submit(request)
        await _until_whole(arrangement, clients)
    return list(clients.heard.values())


async def serve_alone(build: Build, requests: Sequence[Request]) -> list[Heard]:
    """Sends each request after the one before it has ended. Raises as `serve` does."""
    clients = Clients()
    async with _running(build(clients.hear)) as arrangement:
        for request in requests:
            clients.add(request, time.perf_counter_ns())
            arrangement.submit(request)
            await _until_whole(arrangement, clients)
    return list(clients.heard.values())


@asynccontextmanager
async def _running(arrangement: Arrangement) -> AsyncIterator[Arrangement]:
    for engine in arrangement.engines:
        engine.start()
    try:
        yield arrangement
    finally:
        for engine in arrangement.engines:
            await engine.close()
            engine.failed.cancel()


async def _until_whole(arrangement: Arrangement, clients: Clients) -> None:
    """Waits until all requests are answered and the engines idle. Raises Stuck, or what failed an engine."""
    whole = asyncio.ensure_future(_whole(arrangement, clients))
    failures = [engine.failed for engine in arrangement.engines]
    await asyncio.wait({whole, *failures}, timeout=MAX_RUN_S, return_when=asyncio.FIRST_COMPLETED)
    for failed in failures:
        if failed.done():
            whole.cancel()
            failed.result()
    if not whole.done():
        whole.cancel()
        num_missing = sum(not heard.is_whole for heard in clients.heard.values())
        raise Stuck(f"{num_missing} of {len(clients.heard)} requests were not answered in {MAX_RUN_S:g} s")


async def _whole(arrangement: Arrangement, clients: Clients) -> None:
    await clients.all_whole.wait()
    for engine in arrangement.engines:
        await engine.wait_idle()
