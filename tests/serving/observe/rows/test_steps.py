"""A row for each step of a worker, with what it computed and how long it took, and nobody's tokens held up for it."""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from moonshard.serving.control.plan import CopyPlan, DecodePlan, DecodeRow, LoadPlan, Plan
from moonshard.serving.control.request import Request, SequenceId, SlotId
from moonshard.serving.engine.device import StepDone
from moonshard.serving.engine.events import StepReport
from moonshard.serving.engine.steps import StepKind
from moonshard.serving.observe.rows.parts import read_table
from moonshard.serving.observe.rows.recorder import Recorder
from moonshard.serving.observe.rows.schema import STEPS, TableRow
from moonshard.serving.observe.rows.steps import RecordedSteps
from moonshard.serving.observe.rows.timeline import timeline
from tests.serving.fake_executor import BLOCK_SIZE, TILE, FakeExecutor, an_engine
from tests.serving.observe.rows.trace_format import check_format

NAMES = [column.name for column in STEPS.columns]
WORKER = "127.0.0.1:1"
REQUEST = Request(id=b"r" * 16, prompt=tuple(range(20)), max_tokens=4)


def as_dict(row: TableRow) -> dict:
    return dict(zip(NAMES, row, strict=True))


def done(kind: StepKind = StepKind.DECODE, *, launched_ns: int, done_ns: int) -> StepDone:
    return StepDone(
        number=0,
        kind=kind,
        drawn=None,
        exported=None,
        bucket=4,
        partition=3,
        num_blocks=2,
        launched_ns=launched_ns,
        enqueued_ns=launched_ns + 5,
        done_ns=done_ns,
        was_overlapped=False,
    )


def told(plan: Plan | None, *steps: StepDone) -> list[dict]:
    rows: list[TableRow] = []
    trace = RecordedSteps(rows.append, WORKER).trace(epoch=b"\x01\x02", role="decode")
    for step in steps:
        trace(step, plan)
    return [as_dict(row) for row in rows]


def test_a_step_took_what_it_added_to_the_time_that_the_device_was_busy():
    rows = told(
        None, done(launched_ns=0, done_ns=100), done(launched_ns=40, done_ns=130), done(launched_ns=200, done_ns=210)
    )
    assert [row["device_ns"] for row in rows] == [100, 30, 10]
    assert [row["host_ns"] for row in rows] == [5, 5, 5]
    assert [(row["worker"], row["epoch"], row["role"]) for row in rows] == [(WORKER, "0102", "decode")] * 3


def test_what_a_step_was_for():
    sequence, table = SequenceId(REQUEST.id, 0), (0, 1)

    def row(partition: int, position: int) -> DecodeRow:
        slot = SlotId(partition, 0)
        return DecodeRow(sequence=sequence, request=REQUEST, slot=slot, position=position, block_table=table)

    (decode,) = told(DecodePlan(number=0, rows=(row(2, 9), row(0, 4), row(2, 0))), done(launched_ns=0, done_ns=1))
    assert (decode["partitions"], decode["batch"], decode["tokens"], decode["context_tokens"]) == ((0, 2), 3, 3, 16)
    (copy,) = told(CopyPlan(number=0, pairs=((1, 2, 3), (1, 4, 5))), done(StepKind.COPY, launched_ns=0, done_ns=1))
    assert (copy["partitions"], copy["tokens"], copy["blocks"]) == ((1,), 0, 2)
    plan = LoadPlan(number=0, sequence=sequence, request=REQUEST, slot=SlotId(1, 0), history=(1,))
    (load,) = told(plan, done(StepKind.LOAD, launched_ns=0, done_ns=1))
    assert (load["partitions"], load["batch"], load["tokens"]) == ((1,), 1, 0)
    (land,) = told(None, done(StepKind.LAND, launched_ns=0, done_ns=1))
    assert (land["partitions"], land["blocks"], land["bucket"]) == ((3,), 2, 4)


async def test_every_step_of_an_engine_is_a_row_in_its_order(tmp_path: Path):
    recorder = Recorder(tmp_path, [STEPS], max_rows=4, max_age_s=1000, max_bytes=1 << 40)
    recorder.start()
    ended = asyncio.Event()

    def on_step(report: StepReport) -> None:
        if report.ended:
            ended.set()

    executor = FakeExecutor()
    trace = RecordedSteps(recorder.rows(STEPS).append, WORKER).trace(epoch=b"e", role="both")
    engine = an_engine(executor, on_step=on_step, on_done=trace)
    engine.start()
    begun_ns = time.perf_counter_ns()
    engine.submit(REQUEST)
    await asyncio.wait_for(ended.wait(), 30)
    engine.export(0, [1], lambda blocks: None)
    engine.land(0, [1, 2], np.zeros((2, 1, BLOCK_SIZE, 1), np.float32), lambda: None)
    await asyncio.wait_for(engine.wait_idle(), 30)
    await engine.close()
    recorder.close()
    found = read_table(tmp_path, STEPS).sort("handled_ns")
    assert found["kind"].to_list() == [kind.value for kind in executor.kinds]
    assert found["number"].to_list() == [step.number for step in executor.launched]
    prefills, decodes = found.filter(kind="prefill"), found.filter(kind="decode")
    assert prefills["tokens"].to_list() == [TILE, 20 - TILE]
    assert prefills["context_tokens"].to_list() == [TILE, 20]
    assert decodes["context_tokens"].to_list()[:3] == [21, 22, 23]
    assert found.filter(kind="land")["blocks"].to_list() == [2]
    assert found.filter(kind="export")["blocks"].to_list() == [1]
    stamps = found.select("launched_ns", "done_ns", "handled_ns").rows()
    assert all(begun_ns < launched <= done <= handled for launched, done, handled in stamps)
    assert (found["device_ns"] > 0).all()
    assert (found["device_ns"] <= found["done_ns"] - found["launched_ns"]).all()
    drawn = check_format(timeline([], found.iter_rows(named=True)))  # no two at once on the device, nor launched
    assert sum(event["ph"] == "X" for event in drawn) == 2 * found.height


@pytest.mark.parametrize("is_recorded", [False, True])
async def test_an_engine_that_is_not_recorded_gives_the_same(is_recorded: bool):
    reports: list[StepReport] = []
    rows: list[TableRow] = []
    trace = RecordedSteps(rows.append, WORKER).trace(epoch=b"e", role="both") if is_recorded else None
    engine = an_engine(FakeExecutor(), on_step=reports.append, on_done=trace)
    engine.start()
    engine.submit(REQUEST)
    await asyncio.wait_for(engine.wait_idle(), 30)
    await engine.close()
    assert [token for report in reports for item in report.emitted for token in item.output.token_ids] == [7] * 4
    assert bool(rows) is is_recorded
