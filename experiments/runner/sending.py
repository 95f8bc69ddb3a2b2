"""Sends a workload: each request at its time whatever became of the others, or a pause after the one it waits for.

The open loop never waits for an answer: what it cannot send in time it sends late, and how late is recorded. A prompt
is made before its time comes, since one of many tokens takes milliseconds.
"""

import asyncio
import time
from collections import defaultdict

from moonshard.experiments.runner.asking import ABANDONED, COMPLETED, ClientRequest, ask
from moonshard.experiments.runner.points import ClientOptions
from moonshard.experiments.workload.plan import Workload
from moonshard.rpc.client import AsyncClient

LEAD_S = 0.1  # before the first request, for making its prompt
GRACE_S = 5.0  # for what is on its way when nothing more is to be sent
NS = 1_000_000_000


class Sender:
    """Sends one workload. `asked` has the requests that have ended so far, in the order in which they did."""

    def __init__(self, client: AsyncClient, workload: Workload, options: ClientOptions, id_prefix: str) -> None:
        self.asked: list[ClientRequest] = []
        self.num_planned = len(workload.requests)
        self.num_sent = 0
        self.num_failed = 0
        self.num_late = 0
        self._client, self._workload, self._options, self._id_prefix = client, workload, options, id_prefix
        self._followers: dict[int, list[int]] = defaultdict(list)  # by the request that they wait for
        for index, planned in enumerate(workload.requests):
            if planned.after is not None:
                self._followers[planned.after].append(index)
        self._waiting: set[asyncio.Task[None]] = set()  # for the time of a request
        self._asking: set[asyncio.Task[None]] = set()
        self._is_stopped = False

    async def run(self) -> None:
        """Sends everything; returns when every request has ended, or `stop` has."""
        begun_ns = time.perf_counter_ns() + round(LEAD_S * NS)
        async with asyncio.TaskGroup() as group:
            pacer = group.create_task(self._pace(group, begun_ns))
            self._waiting.add(pacer)

    async def stop(self) -> None:
        """Sends nothing more. Requests still running after a grace period are abandoned."""
        self._is_stopped = True
        for task in tuple(self._waiting):
            task.cancel()
        if self._asking:
            await asyncio.wait(self._asking, timeout=GRACE_S)
        for task in tuple(self._asking):
            task.cancel()

    async def _pace(self, group: asyncio.TaskGroup, begun_ns: int) -> None:
        """Sends each request that has a time of its own at that time."""
        timed = [
            (planned.at_s, index) for index, planned in enumerate(self._workload.requests) if planned.at_s is not None
        ]
        for at_s, index in sorted(timed):
            due_ns = begun_ns + round(at_s * NS)
            prompt = self._workload.requests[index].prompt.tokens()
            await _sleep_until(due_ns)
            self._begin(group.create_task(self._ask(group, index, prompt, due_ns)))

    async def _follow(self, group: asyncio.TaskGroup, index: int, due_ns: int) -> None:
        prompt = self._workload.requests[index].prompt.tokens()
        await _sleep_until(due_ns)
        task = asyncio.current_task()
        assert task is not None  # a coroutine runs in one
        self._waiting.discard(task)
        self._begin(task)
        await self._ask(group, index, prompt, due_ns)

    def _begin(self, task: asyncio.Task[None]) -> None:
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _ask(self, group: asyncio.TaskGroup, index: int, prompt: list[int], due_ns: int) -> None:
        self.num_sent += 1
        one = await ask(
            self._client,
            self._workload.requests[index],
            prompt,
            request_index=index,
            request_id=f"{self._id_prefix}{index:06}",
            intended_ns=due_ns,
            options=self._options,
        )
        self.asked.append(one)
        self.num_failed += one.outcome != COMPLETED
        self.num_late += one.late_ns > self._options.late_ms * 1e6
        if self._is_stopped or one.outcome == ABANDONED:
            return
        for follower in self._followers[index]:
            pause_ns = round(self._workload.requests[follower].pause_s * NS)
            task = group.create_task(self._follow(group, follower, one.ended_ns + pause_ns))
            self._waiting.add(task)


async def _sleep_until(due_ns: int) -> None:
    await asyncio.sleep(max(0.0, (due_ns - time.perf_counter_ns()) / NS))
