"""One process that the driver has been told to start: its place, its actor, and what is heard of it."""

import asyncio
import contextlib
import signal
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
    PlacementGroupSchedulingStrategy,
)

from moonshard.serving.deploy.on_ray.cluster import Cluster, NoRoom
from moonshard.serving.deploy.on_ray.node_process import NodeProcess
from moonshard.serving.deploy.on_ray.orders import NODE, Start
from moonshard.serving.deploy.on_ray.placement import CPU
from moonshard.serving.deploy.startup import STARTUP_EXIT_CODE
from moonshard.serving.deploy.status_pipe import Status

GPU = "GPU"  # beside CPU the one resource that an actor asks for by a name of its own
START_S = 60.0  # for a node to have an actor, once there is room
KILL_S = 2.0  # for a process to be killed by its actor; then that is killed, and with it the process
FAILED_EXIT_CODE = 1


class Placed:
    """From the order to start it to its end, which is told exactly once."""

    def __init__(self, start: Start, cluster: Cluster, status: Status) -> None:
        self._start = start
        self._cluster = cluster
        self._status = status
        self._actor: Any = None
        self._signals: set[asyncio.Task[None]] = set()
        self.task = asyncio.create_task(self._run())

    def signal(self, number: int) -> None:
        """One that has no actor yet is not started; one that does not end by SIGKILL ends all the same."""
        if self._actor is None:
            self.task.cancel()
            return
        sending = asyncio.create_task(self._send(self._actor, number))
        self._signals.add(sending)
        sending.add_done_callback(self._signals.discard)

    async def _send(self, actor: Any, number: int) -> None:
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            await asyncio.wait_for(_result(actor.signal.remote(number)), KILL_S)
        if number == signal.SIGKILL:
            await asyncio.wait({self.task}, timeout=KILL_S)
            self.task.cancel()

    async def _run(self) -> None:
        code = -signal.SIGKILL
        try:
            code = await self._live()
        except NoRoom as error:
            code = self._fail(f"--launcher ray: {error}", STARTUP_EXIT_CODE)
        except (ray.exceptions.RayError, TimeoutError, OSError) as error:
            code = self._fail(f"its actor is lost: {_reason(error)}", FAILED_EXIT_CODE)
        finally:
            if self._actor is not None:
                ray.kill(self._actor)
            if self._start.member == 0:
                self._cluster.free(self._start.gang)
            self._status("ended", {"number": self._start.number, "code": code})

    def _fail(self, message: str, code: int) -> int:
        self._say("failed", {"message": message, "exit_code": code})
        return code

    def _say(self, event: str, fields: dict[str, object]) -> None:
        self._status("said", {"number": self._start.number, "event_said": event, "fields": fields})

    async def _live(self) -> int:
        """The exit code of the process, once all that it said is told."""
        start = self._start
        self._say("progress", {"message": "waiting for a place"})
        group = await self._cluster.group_for(start)
        address = self._cluster.address_of(group, start.member)
        actor = self._actor = _actor_for(start, group)
        argv = [word.replace(NODE, address) for word in start.argv]
        await asyncio.wait_for(_result(actor.start.remote(argv, start.environment, start.key)), START_S)
        while True:
            for kind, *said in await _result(actor.news.remote()):
                if kind == "event":
                    self._say(*said)
                elif kind == "line":
                    self._status("line", {"number": start.number, "text": said[0]})
                else:
                    return said[0]


def _actor_for(start: Start, group: Any) -> Any:
    others = {resource: amount for resource, amount in start.bundle.items() if resource not in (CPU, GPU)}
    return (
        ray.remote(NodeProcess)
        .options(
            num_cpus=start.bundle.get(CPU, 0),
            num_gpus=start.bundle.get(GPU, 0),
            resources=others,
            max_restarts=0,  # its process comes back with its gang, in a new place
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=start.member),
        )
        .remote()
    )


async def _result(reference: Any) -> Any:
    """As a coroutine, which can be given a time."""
    return await reference


def _reason(error: BaseException) -> str:
    """The last line of Ray's several, which says what has died of what."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
