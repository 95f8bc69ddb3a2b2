"""Blocks leave and land between an engine's own steps, in the order in which everything was submitted."""

import asyncio
import threading

import numpy as np
import pytest

from moonshard.kv.blocks import BlockPool
from moonshard.serving.control.plan import PrefillPlan
from moonshard.serving.control.request import Request
from moonshard.serving.engine.engine import Engine
from moonshard.serving.engine.events import StepReport
from moonshard.serving.engine.pace import MIN_IN_FLIGHT
from moonshard.serving.engine.steps import StepKind
from tests.serving.fake_executor import BLOCK_SIZE, NUM_BLOCKS, TILE, FakeExecutor, an_engine

REQUEST = Request(id=b"r" * 16, prompt=(1,) * (2 * TILE + 3), max_tokens=1)


async def finish(engine: Engine) -> None:
    """Runs everything to its end; a fault is raised, and a forgotten request ends in a timeout."""
    async with asyncio.timeout(10):
        idle = asyncio.ensure_future(engine.wait_idle())
        await asyncio.wait({idle, engine.failed}, return_when=asyncio.FIRST_COMPLETED)
    if engine.failed.done():
        engine.failed.result()
    await engine.close()


def wait_for(event: threading.Event) -> None:
    event.wait()


def payload_of(num_blocks: int) -> np.ndarray:
    return np.arange(num_blocks, dtype=np.float32).reshape(-1, 1, 1, 1)


async def test_an_export_made_in_the_callback_runs_behind_its_chunk_and_before_the_next():
    executor, seen = FakeExecutor(), []

    def on_prefill(plan):
        seen.append(plan)
        engine.export(0, plan.chunks[0].block_table[:1], lambda exported: None)

    engine = an_engine(executor, on_prefill=on_prefill)
    engine.start()
    engine.submit(REQUEST)
    await finish(engine)
    assert executor.kinds == [StepKind.PREFILL, StepKind.EXPORT] * 3
    assert [plan.chunks[0].start for plan in seen] == [0, TILE, 2 * TILE]


async def test_blocks_beyond_the_largest_bucket_come_as_one_array_in_their_order():
    executor, exported = FakeExecutor(), []
    engine = an_engine(executor)
    engine.start()
    engine.export(0, [5, 0, 3, 7, 2, 6], exported.append)
    engine.export(0, (4,), exported.append)
    await finish(engine)
    assert [step.bucket for step in executor.launched] == [4, 4, 1]
    assert [blocks.flatten().tolist() for blocks in exported] == [[5, 0, 3, 7, 2, 6], [4]]


async def test_a_land_of_many_blocks_is_told_once_when_all_are_there():
    executor, told = FakeExecutor(), []
    engine = an_engine(executor)
    engine.start()
    engine.land(0, [5, 0, 3, 1, 7], payload_of(5), lambda: told.append(len(executor.launched)))
    await finish(engine)
    assert told == [2]
    assert [step.payload.flatten().tolist() for step in executor.launched if step.payload is not None] == [
        [0, 1, 2, 3],
        [4],
    ]


async def test_what_is_submitted_after_a_land_is_launched_after_it():
    executor = FakeExecutor()
    engine = an_engine(executor)
    engine.land(0, [1], payload_of(1), lambda: None)
    engine.submit(REQUEST)
    engine.start()
    await finish(engine)
    assert executor.kinds == [StepKind.LAND] + [StepKind.PREFILL] * 3


async def test_the_steps_of_an_exchange_are_none_of_the_schedulers():
    executor, reports = FakeExecutor(), []
    engine = an_engine(executor, on_step=reports.append)
    engine.start()
    for block in range(4):
        engine.export(0, [block], lambda exported: None)
        engine.land(0, [block], payload_of(1), lambda: None)
    engine.submit(REQUEST)
    await finish(engine)
    numbers = [step.number for step in executor.launched]
    assert len(set(numbers)) == len(numbers)
    assert max(numbers[:8]) < -1  # which is a step of the compilation
    assert numbers[8:] == [0, 1, 2]
    assert [report.number for report in reports] == [2]


@pytest.mark.parametrize("verb", ["export", "land"])
async def test_an_engine_is_not_idle_while_blocks_are_on_their_way(verb: str):
    is_let_go, told = threading.Event(), []
    engine = an_engine(FakeExecutor(fetch=lambda number: wait_for(is_let_go)))
    engine.start()
    if verb == "export":
        engine.export(0, [1], told.append)
    else:
        engine.land(0, [1], payload_of(1), lambda: told.append(None))
    idle = asyncio.ensure_future(engine.wait_idle())
    await asyncio.sleep(0)
    assert not idle.done()
    engine.wake()  # looks whether all is idle
    await asyncio.sleep(0)
    assert not idle.done()
    is_let_go.set()
    await idle
    assert len(told) == 1
    await engine.close()


async def test_exports_take_no_place_of_the_steps_that_compute():
    plans: list[PrefillPlan] = []
    engine = an_engine(FakeExecutor(), on_prefill=plans.append)
    for block in range(6):
        engine.export(0, [block], lambda exported: None)
    engine.submit(REQUEST)
    assert len(plans) == MIN_IN_FLIGHT  # of which none can have run: the device has not been started
    engine.start()
    await finish(engine)
    assert len(plans) == 3


async def test_a_request_that_waits_for_blocks_gets_those_that_an_export_gives_back():
    pool = BlockPool(1, NUM_BLOCKS, BLOCK_SIZE)
    held = pool.allocate(0, NUM_BLOCKS) or ()
    engine = an_engine(executor := FakeExecutor(), pool=pool)
    engine.start()
    engine.submit(REQUEST)
    engine.export(0, held, lambda exported: pool.release(0, held))
    await finish(engine)
    assert executor.kinds == [StepKind.EXPORT] * 2 + [StepKind.PREFILL] * 3
    assert pool.num_free(0) == NUM_BLOCKS


@pytest.mark.parametrize(("blocks", "num_payload"), [((), 0), ((1, 2), 1)])
async def test_no_blocks_or_a_payload_of_others_are_refused_at_once(blocks, num_payload):
    engine = an_engine(executor := FakeExecutor())
    engine.start()
    with pytest.raises(ValueError, match="blocks"):
        engine.land(0, blocks, payload_of(num_payload), lambda: None)
    if not blocks:
        with pytest.raises(ValueError, match="blocks"):
            engine.export(0, blocks, lambda exported: None)
    await finish(engine)
    assert executor.launched == []


async def test_a_request_that_joins_is_told_its_landing_and_its_wait_and_no_prefill():
    reports: list[StepReport] = []
    pool = BlockPool(1, NUM_BLOCKS, BLOCK_SIZE)
    engine = an_engine(FakeExecutor(), on_step=reports.append, pool=pool)
    engine.start()
    asked = Request(id=b"j" * 16, prompt=(1,) * (TILE + 3), max_tokens=4)
    assert engine.join(asked, 0, pool.allocate(0, 2) or (), (9,), land_ms=12.5)
    await finish(engine)
    first, middle, last = (emitted.phases for report in reports for emitted in report.emitted)
    assert middle is None
    assert first is not None
    assert last is not None
    for phases in (first, last):
        assert (phases.queue_ms, phases.prefill_ms, phases.land_ms) == (0, 0, 12.5)
        assert phases.join_ms == first.join_ms > 0
    assert 0 < first.decode_ms < last.decode_ms
    assert reports[-1].ended == (asked.id,)


async def test_a_request_that_its_first_token_ended_leaves_nothing_behind():
    pool = BlockPool(1, NUM_BLOCKS, BLOCK_SIZE)
    engine = an_engine(executor := FakeExecutor(), pool=pool)
    engine.start()
    asked = Request(id=b"j" * 16, prompt=(1, 2), max_tokens=1)
    assert not engine.join(asked, 0, pool.allocate(0, 1) or (), (9,), land_ms=0.0)
    await finish(engine)
    assert executor.launched == []
    assert pool.num_free(0) == NUM_BLOCKS
