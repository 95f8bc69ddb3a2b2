"""Made-up runs, on disk and in memory: their content is known, and so is what must be computed from it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from moonshard.experiments.common.flat import Flat
from moonshard.experiments.reading.tables.frames import RunFrames, TrialFrames
from moonshard.experiments.runner.experiment import Experiment, load_experiment
from moonshard.experiments.runner.run_folder import new_run
from moonshard.experiments.runner.run_record import PointRecord, RunRecord, RunStart, TrialState
from moonshard.experiments.runner.schema import CLIENT_REQUESTS, CLIENT_TOKENS
from moonshard.experiments.runner.sweep import Trial, expand, label
from moonshard.experiments.runner.trial import TrialRecord
from moonshard.rpc.types import ModelInfo
from moonshard.serving.observe.rows.origin import this_process
from moonshard.serving.observe.rows.parts import encode_part, load_polars, write_part
from moonshard.serving.observe.rows.schema import REQUESTS, STEPS, Column, Table, Value
from tests.experiments.runner.test_experiment import BASE

MODEL = ModelInfo(
    model="m", max_context_tokens=99, vocab_size=9, stop_token_ids=(), has_tokenizer=False, dtype="float32",
    fingerprint="f", version="0",
)  # fmt: skip
SWEEP = BASE + '[slo]\nttft_ms = 1\n[sweep]\nserver.mode = ["aggregated", "disaggregated"]\n'
MS = 1_000_000
GAP_MS = 4
NUM_REQUESTS, NUM_TOKENS = 4, 3
ZEROS: Mapping[str, Value] = {"text": "", "int": 0, "float": 0.0, "bool": False, "ints": (0,)}


def made_up_run(out: Path, name: str = "made_up", sweep: str = SWEEP, *, has_tokens: bool = True) -> Path:
    """Two repeats of each point. Request n comes after n * 100 ms and has a TTFT of n + 1 + 10 * point ms."""
    load_polars()
    (out / name).mkdir(parents=True, exist_ok=True)
    (out / name / "config.toml").write_text(sweep)
    experiment = load_experiment(out / name)
    with new_run(out / "results", experiment) as folder:
        for trial in folder.left():
            with folder.trial(trial) as part:
                _write_trial(part, experiment, trial, has_tokens)
        folder.write()
    return folder.path


def _write_trial(part: Path, experiment: Experiment, trial: Trial, has_tokens: bool) -> None:
    record = TrialRecord(
        trial=trial.name, point=trial.point, repeat=trial.repeat, begun_at="", workload={}, model=MODEL, is_open=True,
        offered_per_s=10.0, num_planned=NUM_REQUESTS, num_clipped=0, num_sent=NUM_REQUESTS, num_failed=1, num_late=0,
        wall_s=2.0, client_cpu_s=0.5, server_cpu_s={"gateway": 1.0},
    )  # fmt: skip
    (part / "trial.json").write_bytes(msgspec.json.encode(record))
    _write(part / "requests.parquet", CLIENT_REQUESTS, [_request(trial, index) for index in range(NUM_REQUESTS)])
    if has_tokens:
        _write(part / "tokens.parquet", CLIENT_TOKENS, [row for n in range(NUM_REQUESTS - 1) for row in _tokens(n)])
    served = [_served(trial, index) for index in range(-1, NUM_REQUESTS)]
    _write(part / "server" / "requests" / "a.parquet", REQUESTS, served)
    _write(part / "server" / "steps" / "a.parquet", STEPS, [_step(n) for n in range(-2, 6)])


def _request(trial: Trial, index: int) -> Mapping[str, Value]:
    """The last one failed."""
    has_failed = index == NUM_REQUESTS - 1
    known = {
        "request_id": f"{trial.name}-{index}",
        "request_index": index,
        "outcome": "unavailable" if has_failed else "completed",
        "max_tokens": NUM_TOKENS,
        "sent_ns": 1000 * MS + 100 * MS * index,
        "e2e_ns": 20 * MS,
    }
    if has_failed:
        return known
    ttft_ns = MS * (index + 1 + 10 * trial.point)
    latencies = {"ttft_ns": ttft_ns, "decode_ns": 2 * GAP_MS * MS, "max_itl_ns": GAP_MS * MS}
    counts = {"prompt_tokens": 20, "cached_tokens": 0, "completion_tokens": NUM_TOKENS}
    return known | latencies | counts


def _tokens(index: int) -> Sequence[Mapping[str, Value]]:
    start_ns = 1001 * MS + 100 * MS * index
    return [{"request_index": index, "index": n, "arrived_ns": start_ns + n * GAP_MS * MS} for n in range(NUM_TOKENS)]


def _served(trial: Trial, index: int) -> Mapping[str, Value]:
    """Of index -1: a warm-up's."""
    name = f"{trial.name}-{index}" if index >= 0 else f"{trial.name}-warmup-0"
    return {"request_id": name, "received_ns": 1000 * MS, "e2e_ns": 20 * MS, "gateway_queue_ns": 20 * MS}


def _step(number: int) -> Mapping[str, Value]:
    """Those below 0 came before the first request. Prefills take 3 ms, decodes 2."""
    done_ns = 1010 * MS + 50 * MS * number
    kind, ms = ("prefill", 3) if number % 2 else ("decode", 2)
    sizes = {"bucket": 4, "batch": 1, "tokens": 4, "context_tokens": 8}
    stamps = {"launched_ns": done_ns - ms * MS, "device_ns": ms * MS, "done_ns": done_ns}
    return {"kind": kind, "number": number, **sizes, **stamps}


def _write(path: Path, table: Table, rows: Sequence[Mapping[str, Value]]) -> None:
    columns = [[_value(column, row) for row in rows] for column in table.columns]
    write_part(path, encode_part(table, columns, this_process().row()))


def _value(column: Column, row: Mapping[str, Value]) -> Value:
    return row.get(column.name, None if column.is_optional else ZEROS[column.kind])


FRAME_SETTINGS: Flat = {"workload.rate_per_s": 1.0, "slo.ttft_ms": 20.0, "slo.attainment": 0.5}


def trial_frames(ttfts_ms: Sequence[float | None], gap_ms: float = 2.0, prompt: int = 5, **told: Any) -> TrialFrames:
    """A request for each TTFT, with three tokens; None: it failed."""
    rows = [
        {
            "request_index": index,
            "outcome": "unavailable" if ttft_ms is None else "completed",
            "ttft_ms": ttft_ms,
            "tpot_ms": None if ttft_ms is None else gap_ms,
            "max_itl_ms": None if ttft_ms is None else gap_ms,
            "e2e_ms": (ttft_ms or 0.0) + 2 * gap_ms,
            "handoff_gap_ms": None,
            "completion_tokens": 0 if ttft_ms is None else 3,
            "prompt_tokens": None if ttft_ms is None else prompt,
            "cached_tokens": None if ttft_ms is None else 1,
            "planned_prompt_tokens": prompt,
            "max_tokens": 3,
            "session": None,
            "turn": 0,
        }
        for index, ttft_ms in enumerate(ttfts_ms)
    ]
    tokens = [
        {"request_index": row["request_index"], "index": number, "arrived_ns": 7 * MS + round(number * gap_ms * MS)}
        for row in rows
        for number in range(row["completion_tokens"])
    ]
    floats = dict.fromkeys(("ttft_ms", "tpot_ms", "max_itl_ms", "handoff_gap_ms"), pl.Float64)
    record = TrialRecord(
        **{
            "trial": "x", "point": 0, "repeat": 0, "begun_at": "", "workload": {"seed": 0}, "model": MODEL,
            "is_open": True, "offered_per_s": 1.0, "num_planned": len(rows), "num_clipped": 0, "num_sent": len(rows),
            "num_failed": sum(one is None for one in ttfts_ms), "num_late": 1, "wall_s": 2.0, "client_cpu_s": 0.5,
        } | told,
    )  # fmt: skip
    requests = pl.DataFrame(rows, schema_overrides={**floats, "prompt_tokens": pl.Int64, "cached_tokens": pl.Int64})
    return TrialFrames(record, requests, pl.DataFrame(tokens, schema=dict.fromkeys(tokens[0], pl.Int64)))


def run_frames(*repeats: TrialFrames) -> RunFrames:
    point = PointRecord(number=0, label="p", state="done", swept={}, settings=FRAME_SETTINGS)
    states = [TrialState(name="x", point=0, repeat=repeat, state="done") for repeat in range(len(repeats))]
    start = RunStart(at="", commit="c", versions={}, machine={})
    record = RunRecord(
        schema_version=1, trace_version=1, name="r", state="done", url=None, given={}, repeats=len(repeats),
        starts=[start], points=[point], trials=states,
    )  # fmt: skip
    return RunFrames(Path("r"), record, {(0, repeat): one for repeat, one in enumerate(repeats)})


SETTINGS: Flat = {
    "server.mode": "aggregated",
    "server.decode.max_slots": 4,
    "server.gateway.port": 8000,
    "workload.kind": "fixed",
    "workload.rate_per_s": 1.0,
    "slo.ttft_ms": 500.0,
}
MACHINE: dict[str, object] = {"cpu": "one", "cores": 2, "memory_gib": 8.0, "load_average_before": 0.1}


def run_record(sweep: dict[str, list[Any]], settings: Flat | None = None, **machine: object) -> RunRecord:
    base = SETTINGS | (settings or {})
    points = [
        PointRecord(number=n, label=label(swept), state="done", swept=swept, settings=base | swept)
        for n, swept in enumerate(expand(sweep, []))
    ]
    start = RunStart(at="", commit="", versions={}, machine=MACHINE | machine)
    return RunRecord(
        schema_version=1, trace_version=1, name="x", state="done", url=None, given={}, repeats=1,
        starts=[start], points=points,
    )  # fmt: skip
