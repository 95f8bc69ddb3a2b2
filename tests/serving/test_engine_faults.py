"""A fault, wherever it happens, is told: an engine that can take no further step never looks as if it were serving."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from moonshard.kv.blocks import BlockPool
from moonshard.serving.encoder import PoolShape, StepEncoder
from moonshard.serving.engine import Engine, StepReport
from moonshard.serving.programs import Drawn, Launched
from moonshard.serving.request import Request
from moonshard.serving.scheduler import Scheduler, SchedulerConfig
from moonshard.serving.steps import Step, StepShapes

BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS, CONTEXT_TOKENS, TILE = 16, 8, 2, 64, 16
REQUEST = Request(id=b"r" * 16, prompt=(1, 2, 3), max_tokens=8)


class Broken(Exception):
    """What the test made happen."""


class FakeExecutor:
    """Draws token 7 for every row of every step. `fetch` may be told to do otherwise."""

    def __init__(self, fetch: Callable[[int], None] = lambda number: None):
        self._fetch = fetch

    def launch(self, step: Step) -> Launched:
        return Launched(step.number, None)

    def fetch(self, launched: Launched) -> Drawn | None:
        self._fetch(launched.number)
        empty = np.zeros((NUM_SLOTS, 0))
        tokens = np.full(NUM_SLOTS, 7)
        return Drawn(tokens, np.zeros(NUM_SLOTS), empty.astype(np.int32), empty)


def an_engine(executor: FakeExecutor, on_step: Callable[[StepReport], None] = lambda report: None) -> Engine:
    shapes = StepShapes(
        num_slots=NUM_SLOTS,
        blocks_per_sequence=CONTEXT_TOKENS // BLOCK_SIZE,
        max_context_tokens=CONTEXT_TOKENS,
        q_tile=TILE,
        prefill_buckets=(TILE,),
        decode_buckets=(1, NUM_SLOTS),
    )
    config = SchedulerConfig(
        slots_per_partition=NUM_SLOTS,
        chunk_tokens=TILE,
        q_tile=TILE,
        max_context_tokens=CONTEXT_TOKENS,
        max_queued_requests=8,
        queue_timeout_s=10.0,
    )
    pool = PoolShape(num_partitions=1, slots_per_partition=NUM_SLOTS, blocks_per_partition=NUM_BLOCKS)
    return Engine(
        scheduler=Scheduler(config, BlockPool(1, NUM_BLOCKS, BLOCK_SIZE)),
        executor=executor,
        encoder=StepEncoder(shapes, pool),
        on_step=on_step,
        on_expired=lambda request_id, error: None,
    )


async def failure_of(engine: Engine) -> BaseException:
    engine.start()
    engine.submit(REQUEST)
    await asyncio.wait({engine.failed}, timeout=5)
    error = engine.failed.exception()
    assert error is not None
    return error


def breaking(at: int) -> Callable[[object], None]:
    """Raises when it is called for that many-th time."""
    num_calls = 0

    def break_now(_what: object) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == at:
            raise Broken

    return break_now


@pytest.mark.parametrize("at", [1, 3])
async def test_a_fault_on_the_device_fails_the_engine(at: int):
    assert isinstance(await failure_of(an_engine(FakeExecutor(fetch=breaking(at)))), Broken)


@pytest.mark.parametrize("at", [1, 3])
async def test_a_fault_in_what_is_done_with_a_steps_tokens_fails_the_engine(at: int):
    engine = an_engine(FakeExecutor(), on_step=breaking(at))
    assert isinstance(await failure_of(engine), Broken)
    await engine.close()


async def test_a_fault_while_a_step_is_packed_fails_the_engine_and_not_the_link_it_came_over(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(StepEncoder, "encode", lambda self, plan: breaking(1)(plan))
    engine = an_engine(FakeExecutor())
    assert isinstance(await failure_of(engine), Broken)
    await engine.close()


async def test_without_a_fault_the_same_engine_serves():
    engine = an_engine(FakeExecutor())
    engine.start()
    engine.submit(REQUEST)
    async with asyncio.timeout(5):
        await engine.wait_idle()
    await engine.close()
    assert not engine.failed.done()
    engine.failed.cancel()
