"""Gets batches done: each is checked, its lines are run, and its files are written, by a task of its own.

What is begun anew after a kill is what the store does not have: a batch whose lines were not all checked is checked
again, a line without a result is run again (nobody has seen its first answer), and files without a name are written
again. A line is asked until it has an answer that stays: while the server has no room, or no worker, it waits.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.types import ASGIApp

from moonshard.rpc.status import InternalError, RequestError
from moonshard.serving.gateway.batches.inner import Answer, ask
from moonshard.serving.gateway.batches.journal import Journal
from moonshard.serving.gateway.batches.lines import (
    MAX_LINES,
    OTHER_BYTES,
    Line,
    TooManyLines,
    checked_lines,
    read_line,
)
from moonshard.serving.gateway.batches.records import (
    BatchRecord,
    CheckedLine,
    LineError,
    LineResult,
    PendingLine,
    Status,
)
from moonshard.serving.gateway.batches.room import Room
from moonshard.serving.gateway.batches.rows import answered_row
from moonshard.serving.gateway.batches.store import Store
from moonshard.serving.gateway.records.metrics import GatewayMetrics

MAX_OPEN_LINES = 256  # of one batch: begun, or waiting to be asked again, or for the disk
MAX_ERRORS = 100  # of lines that a batch names, where none could be run
PAGE_LINES = 500
MOST_RETRY_S = 10.0
logger = logging.getLogger(__name__)


class NothingToRun(Exception):
    """A file without any line that can be run."""

    def __init__(self, errors: list[LineError]) -> None:
        super().__init__()
        self.errors = errors


class StoreFull(Exception):
    """Results have taken the room that there was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a runner works with."""

    app: ASGIApp  # the routes, for callers within the process
    store: Store
    journal: Journal
    room: Room
    metrics: GatewayMetrics
    max_body_bytes: int


class Runner:
    def __init__(self, work: Work) -> None:
        self._work = work
        self._store, self._journal = work.store, work.journal
        self._batches: dict[str, asyncio.Task[None]] = {}
        self._lines: dict[str, asyncio.Task[None]] = {}  # of batches in progress

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Goes on with what is unfinished, and runs what is begun during the block."""
        async with self._journal.writing():
            for batch_id in await self._journal.run(self._store.unfinished):
                self.begin(batch_id)
            try:
                yield
            finally:
                tasks = list(self._batches.values())
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def begin(self, batch_id: str) -> None:
        """Takes a batch on that the store has."""
        task = asyncio.create_task(self._live(batch_id), name=f"batch {batch_id}")
        self._batches[batch_id] = task
        task.add_done_callback(lambda _: self._batches.pop(batch_id, None))

    def cancel(self, batch_id: str) -> None:
        """The store says already that it is cancelling; its lines end now."""
        if (lines := self._lines.get(batch_id)) is not None:
            lines.cancel()

    async def _live(self, batch_id: str) -> None:
        try:
            batch = await self._record(batch_id)
            if batch.status == "validating":
                await self._check(batch)
            if (await self._record(batch_id)).status == "in_progress":
                await self._run_until_it_ends(batch)
            await self._finish(batch)
        except NothingToRun as nothing:
            await self._end(batch_id, "failed", nothing.errors)
        except StoreFull:
            message = "the results have no room left within batches.max_bytes"
            await self._end(batch_id, "failed", [LineError(code="storage_full", message=message)])
        except Exception:
            logger.exception("%s failed", batch_id)
            await self._end(batch_id, "failed", [LineError(code="internal_error", message="internal error")])

    async def _check(self, batch: BatchRecord) -> None:
        errors = await self._journal.persist(self._checked, batch)
        if errors is not None:
            raise NothingToRun(errors)

    def _checked(self, batch: BatchRecord) -> list[LineError] | None:
        """The batch is in progress: None; or why it cannot be. Blocks."""
        errors: list[LineError] = []
        lines: list[CheckedLine] = []
        try:
            with open(self._store.path_of(batch.input_file_id), "rb") as file:
                for line, error in checked_lines(file, batch.endpoint, self._work.max_body_bytes + OTHER_BYTES):
                    lines.append(line)
                    if error is not None and len(errors) < MAX_ERRORS:
                        errors.append(error)
        except TooManyLines:
            return [LineError(code="too_many_lines", message=f"the file has more than {MAX_LINES} lines")]
        if not lines:
            return [LineError(code="empty_file", message="the file has no lines")]
        if all(line.row is not None for line in lines):
            return errors
        self._store.begin(batch.id, lines)
        return None

    async def _run_until_it_ends(self, batch: BatchRecord) -> None:
        """Until every line has a result, or the batch is cancelled or has expired."""
        lines = self._lines[batch.id] = asyncio.create_task(self._run_lines(batch), name=f"lines of {batch.id}")
        try:
            left_s = max(0.0, batch.expires_at - time.time())
            await asyncio.wait((lines,), timeout=left_s)
        finally:
            del self._lines[batch.id]
            lines.cancel()
            ended = await asyncio.gather(lines, return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0]
            if isinstance(error, Exception):
                raise error

    async def _run_lines(self, batch: BatchRecord) -> None:
        is_open, after = asyncio.Semaphore(MAX_OPEN_LINES), 0
        async with asyncio.TaskGroup() as tasks:
            while page := await self._journal.persist(self._store.pending, batch.id, after, PAGE_LINES):
                for line in page:
                    await is_open.acquire()
                    task = tasks.create_task(self._run_line(batch, line))
                    task.add_done_callback(lambda _: is_open.release())
                after = page[-1].number

    async def _run_line(self, batch: BatchRecord, place: PendingLine) -> None:
        line = read_line(await self._journal.persist(self._said, batch, place), batch.endpoint)
        request_id = secrets.token_hex(16)
        while True:
            async with self._work.room.place():
                if self._journal.is_full:
                    raise StoreFull
                answer = await self._ask(batch, line, request_id)
            if answer.is_final:
                break
            self._work.metrics.batch_retries.inc()
            await asyncio.sleep(min(MOST_RETRY_S, answer.retry_after_s or 1.0))
        row = answered_row(line.custom_id, answer.status, request_id, answer.body)
        is_error = not 200 <= answer.status < 300
        await self._journal.put(LineResult(batch_id=batch.id, number=place.number, row=row, is_error=is_error))

    async def _ask(self, batch: BatchRecord, line: Line, request_id: str) -> Answer:
        return await ask(self._work.app, batch.endpoint, batch.tenant, request_id, bytes(line.body))

    def _said(self, batch: BatchRecord, place: PendingLine) -> bytes:
        with open(self._store.path_of(batch.input_file_id), "rb") as file:
            file.seek(place.start)
            return file.read(place.num_bytes)

    async def _finish(self, batch: BatchRecord) -> None:
        await self._journal.persist(self._store.move, batch.id, "finalizing", of=("in_progress",))
        if (await self._record(batch.id)).status == "cancelling":
            return await self._end(batch.id, "cancelled")
        is_whole = not await self._journal.persist(self._store.pending, batch.id, 0, 1)
        return await self._end(batch.id, "completed" if is_whole else "expired")

    async def _end(self, batch_id: str, status: Status, errors: list[LineError] | None = None) -> None:
        await self._journal.persist(self._store.finish, await self._record(batch_id), status, errors or [])
        self._work.metrics.batches.labels(status).inc()
        try:
            await self._journal.count()
        except RequestError as error:
            logger.warning("%s ended, and the store could not be measured: %s", batch_id, error.message)

    async def _record(self, batch_id: str) -> BatchRecord:
        found = await self._journal.persist(self._store.batch, batch_id)
        if found is None:
            raise InternalError(f"{batch_id} is gone")
        return found
