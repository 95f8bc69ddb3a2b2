"""Coroutines that run beside whoever started them; an error in any of them is told."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Background:
    """The tasks of one event loop. `on_fault` is told each error but a cancellation; nobody waits for their end."""

    def __init__(self, on_fault: Callable[[BaseException], None]):
        self._on_fault = on_fault
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds them weakly

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_fault(error)
