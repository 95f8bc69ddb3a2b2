"""Processor time of a thread's own work: without the garbage collector, which runs in whichever thread sets it off.

A full collection goes through every object of the process. In one with many it takes seconds, and none of them is the
work of the template that happened to be rendered.
"""

import gc
import threading
import time
from collections.abc import Mapping
from typing import Self, final


@final
class OwnTime:
    """Called in the thread that entered it: seconds as `time.thread_time`, without collections since it was entered."""

    def __init__(self) -> None:
        self._collecting_since_s: float | None = None
        self._collected_s = 0.0

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def __call__(self) -> float:
        return time.thread_time() - self._collected_s

    def _note(self, phase: str, info: Mapping[str, int]) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._collecting_since_s = time.thread_time()
        elif self._collecting_since_s is not None:
            self._collected_s += time.thread_time() - self._collecting_since_s
            self._collecting_since_s = None
