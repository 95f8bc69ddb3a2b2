"""Spans of one process on their way to a collector: handed over without waiting, sent by a thread.

A collector that is slow, dead or gone costs memory for so many spans, and then spans, which are counted; nothing else
waits for it. A process that is killed loses those of the last second. What is sent, and how, is `otlp`'s.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from moonshard.serving.config.keys import TelemetryConfig
from moonshard.serving.observe.spans.span import EndedSpan

logger = logging.getLogger(__name__)
PERIOD_S = 1.0  # a span waits no longer to be sent, while the collector keeps up
MAX_WAITING_SPANS = 8192
BATCH_SPANS = 64  # a batch is encoded in one go, for some milliseconds of Python's lock
FLUSH_TIMEOUT_S = 1.5  # at the process's end
ABORT_TIMEOUT_S = 0.5  # then, for what is being sent to be given up


class Exporter(Protocol):
    """Sends to one collector. Called on one thread, but for `close`."""

    def export(self, spans: Sequence[EndedSpan]) -> str | None:
        """None, or why they are lost: it has tried as often as it should."""
        ...

    def close(self) -> None:
        """Ends what is being sent. From any thread, once."""
        ...


class SpanExport:
    """`start` opens the exporter; `close` sends what is left, within a bound. `target` is told in logs."""

    def __init__(self, open_exporter: Callable[[], Exporter], target: str) -> None:
        self._open_exporter = open_exporter
        self._target = target
        self._waiting: deque[EndedSpan] = deque()
        self._is_closing = False
        self._is_given_up = False
        self._is_failing = False  # the last batch was lost
        self._num_overflown = 0  # each count has one thread that changes it
        self._num_unsent = 0
        self._due = threading.Event()
        self._thread = threading.Thread(target=self._send_all, name="spans", daemon=True)

    @property
    def num_lost(self) -> int:
        """Spans that no collector has, nor ever will."""
        return self._num_overflown + self._num_unsent

    def append(self, span: EndedSpan) -> None:
        """Never waits. On one thread only: the event loop's."""
        if len(self._waiting) >= MAX_WAITING_SPANS or self._is_closing:
            self._num_overflown += 1
            return
        self._waiting.append(span)
        if len(self._waiting) == BATCH_SPANS:
            self._due.set()

    def start(self) -> None:
        """Takes as long as importing the SDK does."""
        self._exporter = self._open_exporter()
        self._thread.start()

    def close(self) -> None:
        """What could not be sent in time is lost."""
        self._is_closing = True
        self._due.set()
        self._thread.join(FLUSH_TIMEOUT_S)
        self._is_given_up = True
        self._exporter.close()
        self._thread.join(ABORT_TIMEOUT_S)
        self._num_overflown += len(self._waiting)

    def _send_all(self) -> None:
        while not self._is_closing:
            self._due.wait(PERIOD_S)
            self._due.clear()
            self._send_waiting()
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting and not self._is_given_up:
            batch = [self._waiting.popleft() for _ in range(min(BATCH_SPANS, len(self._waiting)))]
            self._note(len(batch), self._send(batch))
            time.sleep(0)  # whoever serves waits for one batch's encoding, never for all

    def _send(self, batch: Sequence[EndedSpan]) -> str | None:
        try:
            return self._exporter.export(batch)
        except Exception as error:  # whatever it was: a span is never worth a request
            return repr(error)

    def _note(self, num_spans: int, trouble: str | None) -> None:
        """Log once that spans are lost, not once per batch; and once that they are not any more."""
        if trouble is not None:
            self._num_unsent += num_spans
            if not self._is_failing:
                logger.error("spans cannot be exported to %s and are lost: %s", self._target, trouble)
        elif self._is_failing:
            logger.warning("spans are exported to %s again", self._target)
        self._is_failing = trouble is not None


@contextlib.asynccontextmanager
async def exporting(config: TelemetryConfig, *, role: str, instance: str) -> AsyncIterator[SpanExport | None]:
    """An export that runs during the block, for this process: its role, and its address. None where none is wanted."""
    if config.endpoint is None:
        yield None
        return
    export = SpanExport(lambda: _open_exporter(config, role=role, instance=instance), config.endpoint)
    await asyncio.to_thread(export.start)
    try:
        yield export
    finally:
        await asyncio.to_thread(export.close)


def _open_exporter(config: TelemetryConfig, *, role: str, instance: str) -> Exporter:
    from moonshard.serving.observe.spans.otlp import OtlpExporter

    return OtlpExporter(config, role=role, instance=instance)
