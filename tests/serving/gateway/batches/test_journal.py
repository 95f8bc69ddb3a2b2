"""Results on their way to the disk."""

import asyncio
import threading
from pathlib import Path

from moonshard.serving.gateway.batches.journal import Journal
from moonshard.serving.gateway.batches.records import LineResult
from moonshard.serving.gateway.batches.store import Store
from moonshard.serving.gateway.records.metrics import GatewayMetrics


def result(number: int, size: int) -> LineResult:
    return LineResult(batch_id="batch_a", number=number, row=b"x" * size, is_error=False)


async def test_results_that_wait_for_the_disk_take_room_already(tmp_path: Path):
    store, is_ready = Store(tmp_path), threading.Event()
    journal = Journal(store, 100, GatewayMetrics("kimi"))
    async with journal.writing():
        slow = asyncio.create_task(journal.run(is_ready.wait))
        puts = [asyncio.create_task(journal.put(result(number, 40))) for number in range(3)]
        await asyncio.sleep(0)  # all have begun
        try:
            assert not any(put.done() for put in puts)
            assert journal.is_full
        finally:
            is_ready.set()
        await asyncio.gather(slow, *puts)
        assert journal.is_full
        await journal.count()  # the store knows no such lines
        assert not journal.is_full
