"""A run on disk that nobody measured: what its files say is known, and so is what must come of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from moonshard.experiments.lab.experiment import Experiment, load_experiment
from moonshard.experiments.lab.run_folder import begin
from moonshard.experiments.lab.schema import CLIENT_REQUESTS, CLIENT_TOKENS
from moonshard.experiments.lab.sweep import Trial
from moonshard.experiments.lab.trial import TrialRecord
from moonshard.rpc.types import ModelInfo
from moonshard.serving.trace.origin import this_process
from moonshard.serving.trace.parts import encode_part, load_polars, write_part
from moonshard.serving.trace.schema import REQUESTS, STEPS, Column, Table, Value
from tests.experiments.lab.test_experiment import BASE

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
    with begin(out / "results", experiment) as folder:
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
    _write(part / "requests.parquet", CLIENT_REQUESTS, [_request(trial, place) for place in range(NUM_REQUESTS)])
    if has_tokens:
        _write(part / "tokens.parquet", CLIENT_TOKENS, [row for n in range(NUM_REQUESTS - 1) for row in _tokens(n)])
    served = [_served(trial, place) for place in range(-1, NUM_REQUESTS)]
    _write(part / "server" / "requests" / "a.parquet", REQUESTS, served)
    _write(part / "server" / "steps" / "a.parquet", STEPS, [_step(n) for n in range(-2, 6)])


def _request(trial: Trial, place: int) -> Mapping[str, Value]:
    """The last one failed."""
    has_failed = place == NUM_REQUESTS - 1
    known = {
        "request_id": f"{trial.name}-{place}",
        "place": place,
        "outcome": "unavailable" if has_failed else "completed",
        "max_tokens": NUM_TOKENS,
        "sent_ns": 1000 * MS + 100 * MS * place,
        "e2e_ns": 20 * MS,
    }
    if has_failed:
        return known
    ttft_ns = MS * (place + 1 + 10 * trial.point)
    latencies = {"ttft_ns": ttft_ns, "decode_ns": 2 * GAP_MS * MS, "max_itl_ns": GAP_MS * MS}
    counts = {"prompt_tokens": 20, "cached_tokens": 0, "completion_tokens": NUM_TOKENS}
    return known | latencies | counts


def _tokens(place: int) -> Sequence[Mapping[str, Value]]:
    start_ns = 1001 * MS + 100 * MS * place
    return [{"place": place, "index": n, "arrived_ns": start_ns + n * GAP_MS * MS} for n in range(NUM_TOKENS)]


def _served(trial: Trial, place: int) -> Mapping[str, Value]:
    """Of place -1: a warm-up's."""
    name = f"{trial.name}-{place}" if place >= 0 else f"{trial.name}-warmup-0"
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
