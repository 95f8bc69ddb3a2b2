"""How much processor time a recorded row takes: made, kept in columns, encoded and written, all in this process.

Two deployments of the same settings differ in speed by some percent for as long as they live, so comparing them cannot
show a smaller cost. Processor time per row can, with as many rows a token as a deployment recorded. What the rows
displace from caches is not measured, nor rows of tokens (`trace.tokens`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from moonshard.experiments.common.grid import Grid, number
from moonshard.experiments.common.running.measurement import Measurement, Plan
from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc import link_pb2
from moonshard.serving.control.plan import DecodePlan, DecodeRow
from moonshard.serving.control.request import Request, SequenceId, SlotId
from moonshard.serving.engine.device import StepDone
from moonshard.serving.engine.steps import StepKind
from moonshard.serving.gateway.records.events import (
    Assignment,
    AttemptEnded,
    AttemptSent,
    FirstDelivered,
    Leg,
    RequestTokenized,
    TokensArrived,
)
from moonshard.serving.gateway.records.log import OpenReader, RequestLogs
from moonshard.serving.gateway.records.metrics import GatewayMetrics
from moonshard.serving.gateway.records.request_metrics import RequestMetrics
from moonshard.serving.gateway.records.rows import RecordedRequests
from moonshard.serving.gateway.request import GenerationRequest, TokenPrompt
from moonshard.serving.observe.rows.parts import read_table
from moonshard.serving.observe.rows.recorder import Recorder
from moonshard.serving.observe.rows.schema import REQUESTS, STEPS, Table
from moonshard.serving.observe.rows.steps import StepTrace

STEP, REQUEST = "a step's row", "a request's row"
TABLES: Mapping[str, Table] = {STEP: STEPS, REQUEST: REQUESTS}
NUM_ROWS = 4 * 8192  # in parts of the default size: fewer than a recorder keeps waiting
MAX_ROWS = 8192
BAR = 0.01  # of the processor time of a token
TITLE = "What a recorded row costs"
COLUMNS = ("what", "us a row, p50", "rows a token", "us a token", "of a token's processor time", f"bar: {BAR:.0%}")


def measure_rows(plan: Plan) -> list[Measurement]:
    """Microseconds of processor time per row, over all threads: a sample per repeat, after one that is not counted."""
    found: dict[str, list[float]] = {STEP: [], REQUEST: []}
    for _ in range(plan.row_repeats + 1):
        found[STEP].append(_us_a_row(STEPS, lambda recorder: _record_steps(recorder, plan.num_streams)))
        unrecorded_us = _processor_us(lambda: _record_requests(None))
        found[REQUEST].append(_us_a_row(REQUESTS, _record_requests) - unrecorded_us / NUM_ROWS)
    return [
        Measurement(level="recording", name=what, unit="us", samples=tuple(samples[1:]))
        for what, samples in found.items()
    ]


def rows_a_token(folder: Path, num_tokens: int) -> list[Measurement]:
    """Rows per token that a deployment recorded in `folder` for `num_tokens`. PartsError for what is no record."""
    return [
        Measurement(
            level="recording",
            name=by_token(what),
            unit="ratio",
            samples=(read_table(folder, table).height / num_tokens,),
        )
        for what, table in TABLES.items()
    ]


def row_grid(measurements: Sequence[Measurement], processor: str) -> Grid:
    """Empty where a measurement is missing. `processor` names the measurement of a token's time without recording."""
    found = {one.name: one.median for one in measurements if one.level == "recording"}
    needed = {processor, *TABLES, *map(by_token, TABLES)}
    if not needed <= found.keys():
        return Grid(title=TITLE, columns=COLUMNS, rows=())
    whole_us = found[processor]
    by_token_us = {what: found[what] * found[by_token(what)] for what in TABLES}
    rows = [
        (what, number(found[what]), number(found[by_token(what)]), number(us), f"{us / whole_us:.3%}", "")
        for what, us in by_token_us.items()
    ]
    total_us = sum(by_token_us.values())
    said = "held" if total_us < BAR * whole_us else "missed"
    rows.append(("both", "", "", number(total_us), f"{total_us / whole_us:.3%}", said))
    notes = (
        f"A row: processor time of all threads until it is written, of {NUM_ROWS:,} rows a repeat; a step's is of a "
        "decode of all streams. Rows a token: as the recording deployment above wrote them.",
    )
    return Grid(title=TITLE, columns=COLUMNS, rows=tuple(rows), notes=notes)


def by_token(what: str) -> str:
    return f"{what}, rows a token"


def _us_a_row(table: Table, record: Callable[[Recorder], None]) -> float:
    """Processor time of one row until it is written. RuntimeError where rows were lost: they would cost nothing."""
    with TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder), [table], max_rows=MAX_ROWS, max_age_s=10.0, max_bytes=1 << 30)
        recorder.start()

        def whole() -> None:
            record(recorder)
            recorder.close()

        us = _processor_us(whole)
    if recorder.num_lost:
        raise RuntimeError(f"{recorder.num_lost} rows of {table.name} were lost")
    return us / NUM_ROWS


def _processor_us(run: Callable[[], None]) -> float:
    begun_ns = time.process_time_ns()
    run()
    return (time.process_time_ns() - begun_ns) / 1e3


def _record_steps(recorder: Recorder, num_streams: int) -> None:
    trace = StepTrace(recorder.rows(STEPS).append, ("127.0.0.1:50051", bytes(16).hex(), "aggregated"))
    request = Request(id=bytes(16), prompt=(1,), max_tokens=128)
    rows = [
        DecodeRow(
            sequence=SequenceId(bytes(16), 0), request=request, slot=SlotId(0, index), position=200, block_table=(1, 2)
        )
        for index in range(num_streams)
    ]
    plan = DecodePlan(number=1, rows=tuple(rows))
    now_ns = time.perf_counter_ns()
    done = StepDone(
        number=1, kind=StepKind.DECODE, drawn=None, exported=None, bucket=8, partition=0, num_blocks=0,
        launched_ns=now_ns, enqueued_ns=now_ns, done_ns=now_ns, was_overlapped=True,
    )  # fmt: skip
    for _ in range(NUM_ROWS):
        trace(done, plan)


def _record_requests(recorder: Recorder | None) -> None:
    """Requests that got all their tokens. Metrics count them even where nothing is recorded."""
    readers: list[OpenReader] = [partial(RequestMetrics, GatewayMetrics("kimi"))]
    if recorder is not None:
        readers.append(RecordedRequests("kimi", recorder).reader)
    logs = RequestLogs(readers)
    request = GenerationRequest(
        request_id="cmpl-0123456789abcdef", received_ns=time.perf_counter_ns(), prompt=TokenPrompt([1] * 128)
    )
    assignment = Assignment(
        attempt_id=bytes(16), prefill=None, decode=Leg(worker="127.0.0.1:50051", epoch=bytes(16), partition=0)
    )
    output, delta = link_pb2.SequenceOutput(token_ids=[1]), pb.Delta(token_ids=[1])
    for _ in range(NUM_ROWS):
        with logs.opened(request) as log:
            log.append(RequestTokenized(num_prompt_tokens=128, max_tokens=128, num_choices=1))
            log.append(AttemptSent(worker_index=0, assignment=assignment))
            log.append(TokensArrived(time.perf_counter_ns(), output, delta))
            log.append(FirstDelivered())
            log.append(AttemptEnded())
