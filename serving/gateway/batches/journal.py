"""The store on a thread of its own, and results that go to disk together.

A disk that is full or gone stops no server: whoever asks for something that must be written is told (503), and results
wait, in memory and in their lines' tasks, until it takes them again. Meanwhile no line more is begun than `runner` lets
be open.
"""

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from moonshard.rpc.status import TooLarge, Unavailable
from moonshard.serving.config.keys import ConfigError
from moonshard.serving.gateway.batches.records import LineResult
from moonshard.serving.gateway.batches.store import Store
from moonshard.serving.gateway.records.metrics import GatewayMetrics

RETRY_S = 2.0
FLUSH_TIMEOUT_S = 2.0  # for results at the end of the process; one that is lost is asked for again
logger = logging.getLogger(__name__)


class Journal:
    """Belongs to one event loop. `trouble`: why nothing can be written at present; None where all is well."""

    def __init__(self, store: Store, max_bytes: int, metrics: GatewayMetrics) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._thread = ThreadPoolExecutor(1, "batches")
        self._num_bytes = store.num_bytes()  # of files and results
        self._num_bytes_waiting = 0  # of results that are not on disk yet
        self._num_bytes_coming = 0  # of uploads that have not ended
        self._waiting: list[tuple[LineResult, asyncio.Future[None]]] = []
        self._has_results = asyncio.Event()
        self.trouble: str | None = None

    async def run[**P, T](self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a method of the store returns. Unavailable where the disk does not take it."""
        try:
            return await self._on_thread(lambda: work(*args, **kwargs))
        except (sqlite3.Error, OSError) as error:
            self._count_failure(error)
            raise Unavailable(f"batches.path: {error}", retry_after_s=RETRY_S) from error

    async def persist[**P, T](self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `run`, but tries until the disk takes it."""
        is_late = False
        while True:
            try:
                done = await self.run(work, *args, **kwargs)
            except Unavailable as error:
                is_late, self.trouble = True, error.message
                await asyncio.sleep(RETRY_S)
            else:
                if is_late:  # what could be read all the while says nothing
                    self.trouble = None
                return done

    async def put(self, result: LineResult) -> None:
        """Returns once the result is on disk."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((result, done))
        self._num_bytes_waiting += len(result.row)
        self._has_results.set()
        await done

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Results are written during the block; those that are left at its end, within `FLUSH_TIMEOUT_S`."""
        writer = asyncio.create_task(self._write(), name="results of batches")
        try:
            yield
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_TIMEOUT_S):
                    while self._waiting:
                        await asyncio.wait([done for _, done in self._waiting])
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            await self._on_thread(self._store.close)
            self._thread.shutdown()

    async def _write(self) -> None:
        while True:
            await self._has_results.wait()
            self._has_results.clear()
            results = list(self._waiting)
            await self.persist(self._store.put, [result for result, _ in results])
            del self._waiting[: len(results)]
            num_bytes = sum(len(result.row) for result, _ in results)
            self._num_bytes_waiting -= num_bytes
            self._num_bytes += num_bytes
            for result, done in results:
                self._metrics.batch_lines.labels("failed" if result.is_error else "completed").inc()
                if not done.done():
                    done.set_result(None)

    # ---- how much there is

    @property
    def is_full(self) -> bool:
        """Whether results, those that wait for the disk among them, leave no room for another."""
        return self._num_bytes + self._num_bytes_waiting >= self._max_bytes

    def take_room(self, num_bytes: int) -> None:
        """For a part of an upload. TooLarge where files and results would be more than `batches.max_bytes`."""
        taken = self._num_bytes + self._num_bytes_waiting + self._num_bytes_coming
        if taken + num_bytes > self._max_bytes:
            raise TooLarge(f"all files would be larger than batches.max_bytes, {self._max_bytes}", field="file")
        self._num_bytes_coming += num_bytes

    def give_room(self, num_bytes: int) -> None:
        """An upload of so many bytes is over."""
        self._num_bytes_coming -= num_bytes

    async def count(self) -> None:
        """Counts anew, after a file has come or gone."""
        self._num_bytes = await self.run(self._store.num_bytes)

    async def _on_thread[T](self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _count_failure(self, error: Exception) -> None:
        if self.trouble is None:
            logger.error("batches.path cannot be written: %s", error)
        self._metrics.batch_store_failures.inc()


def opened_store(path: Path) -> Store:
    """ConfigError where it cannot be had."""
    try:
        return Store(path)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError([f"batches.path: {path}: {error}"]) from error
