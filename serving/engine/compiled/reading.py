"""A thread that reads a worker's weights while its programs are made, and what is told of both meanwhile.

What is read and what is made is `engine.loading.model`'s business.
"""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

from moonshard.serving.deploy.startup import PREPARING
from moonshard.serving.engine.stage import Stage

Progress = Callable[[str], None]


class Reading:
    """Weights are read on a thread of their own within the block, while the caller makes programs.

    `progress` is told of the weights while they are read, then of the programs. Whatever ends the one ends the other.
    """

    def __init__(self, progress: Progress):
        self._progress = progress
        self._pool = ThreadPoolExecutor(1, PREPARING)
        self._stages: Future[list[Stage]] | None = None
        self._is_over = threading.Event()
        self._read = self._made = ""  # what was last to be told of each

    def __enter__(self) -> "Reading":
        return self

    def __exit__(self, *raised: object) -> None:
        self._is_over.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def begin(self, read: Callable[[Progress], list[Stage]]) -> "Future[list[Stage]]":
        self._stages = self._pool.submit(read, self._tell_read)
        return self._stages

    def _tell_read(self, message: str) -> None:
        if self._is_over.is_set():
            raise CancelledError
        self._read = message
        self._progress(message)

    def count_programs(self, done: int, total: int) -> None:
        """Tells how many programs there are, once the weights are there. Raises what ended the reading."""
        self._made = f"preparing programs {done}/{total}"
        if self._stages is not None and self._stages.done():
            self._stages.result()
            self.tell_programs()
        elif self._read:
            self._progress(self._read)

    def tell_programs(self) -> None:
        if self._made:
            self._progress(self._made)
