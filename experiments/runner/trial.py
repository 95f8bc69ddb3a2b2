"""One trial: a server, a warm-up, the workload of a point once, and the tables of it in a folder.

The load generator shares the machine with what it measures, so that its processor time is part of the result.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from moonshard.experiments.common.signals import run_interruptibly
from moonshard.experiments.runner.asking import COMPLETED, ClientRequest
from moonshard.experiments.runner.experiment import Experiment
from moonshard.experiments.runner.points import ClientOptions
from moonshard.experiments.runner.schema import CLIENT_REQUESTS, CLIENT_TOKENS, VERSION
from moonshard.experiments.runner.sending import Sender
from moonshard.experiments.runner.sweep import Trial
from moonshard.experiments.runner.target import SERVER, RunTarget, death, last_look, target_of
from moonshard.experiments.workload.blocks import BlockPrompt
from moonshard.experiments.workload.options import MAX_SEED, plan, settings_of, with_shifted_seed
from moonshard.experiments.workload.plan import Planned, Workload
from moonshard.rpc.client import AsyncClient, Client
from moonshard.rpc.types import ModelInfo
from moonshard.serving.observe.rows.origin import this_process
from moonshard.serving.observe.rows.parts import PartsError, encode_part, read_table, write_part
from moonshard.serving.observe.rows.schema import REQUESTS, STEPS, Table, Value
from moonshard.serving.observe.rows.timeline import timeline

if TYPE_CHECKING:
    import polars as pl

WARMUP_SEED = 1 << 32  # beyond those of workloads: no prompt of a warm-up begins like one that is measured
MAX_WARMUP_TOKENS = 16
TELL_INTERVAL_S = 0.5

Tell = Callable[[Sender], None]  # how far it is; called now and then


class TrialFailed(Exception):
    """Raised for a trial that did not finish; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRecord:
    """What trial.json holds. Seconds and counts are of the measured part, without the warm-up."""

    schema_version: int = VERSION
    trial: str
    point: int
    repeat: int
    begun_at: str  # UTC
    workload: dict[str, object]  # its options with the seed of this repeat
    model: ModelInfo
    is_open: bool
    offered_per_s: float | None  # requests by the time that the workload gives them; of a closed loop there is none
    num_planned: int
    num_clipped: int
    num_sent: int
    num_failed: int
    num_late: int
    wall_s: float
    client_cpu_s: float
    server_cpu_s: dict[str, float] = field(default_factory=dict)  # by process; of a server that ran already unknown
    why_incomplete: str | None = None


def run_trial(
    experiment: Experiment,
    trial: Trial,
    id_prefix: str,
    folder: Path,
    environment: Mapping[str, str],
    tell: Tell,
    model_before: ModelInfo | None = None,
) -> TrialRecord:
    """Runs one trial and leaves everything in `folder`, which exists.

    Args:
        id_prefix: that of its requests, and nobody else's.
        model_before: what those trials that are done were of whose server was to be the same.

    Raises:
        ServerFailed: it did not start. WorkloadError: the workload does not fit the model. TrialFailed: another model,
        the warm-up failed, or the server's recording cannot be read, lacks something, or was cut short. RequestError:
        the server does not tell its model. OSError: the folder cannot be written.
    """
    point = experiment.points[trial.point]
    with target_of(point, experiment.url, folder, environment) as target:
        record, asked, warmup = run_interruptibly(measure(experiment, trial, id_prefix, target, tell, model_before))
    asked = sorted(asked, key=lambda one: one.request_index)
    _write(folder / "warmup.parquet", CLIENT_REQUESTS, [one.row() for one in warmup])
    _write(folder / "requests.parquet", CLIENT_REQUESTS, [one.row() for one in asked])
    if point.client.tokens:
        _write(folder / "tokens.parquet", CLIENT_TOKENS, [row for one in asked for row in one.token_rows()])
    (folder / "trial.json").write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    if (folder / SERVER).is_dir():
        requests, steps = _recorded(folder / SERVER)
        drawn = timeline(requests.iter_rows(named=True), steps.iter_rows(named=True))
        (folder / "timeline.json").write_bytes(msgspec.json.encode(drawn) + b"\n")
        if record.why_incomplete is None:
            check_ended(target)
            _check_recorded(asked, requests)
            check_steps(requests, steps)
    return record


def seed_shift(experiment: Experiment, trial: Trial, id_prefix: str) -> int:
    """The repeat's number; on a running server, which keeps its cache, another number for each trial and start."""
    if experiment.url is None:
        return trial.repeat
    return int.from_bytes(hashlib.sha256(id_prefix.encode()).digest()[:4]) % MAX_SEED


async def measure(
    experiment: Experiment,
    trial: Trial,
    id_prefix: str,
    target: RunTarget,
    tell: Tell,
    model_before: ModelInfo | None = None,
) -> tuple[TrialRecord, Sequence[ClientRequest], Sequence[ClientRequest]]:
    """The record, what was asked, and the warm-up."""
    point = experiment.points[trial.point]
    shift = seed_shift(experiment, trial, id_prefix)
    options = with_shifted_seed(point.workload, shift)
    begun_at = datetime.now(UTC).isoformat(timespec="seconds")
    async with AsyncClient(target.grpc, api_key=experiment.api_key) as client:
        model = await client.model_info()
        _check_same_model(model_before or model, model)
        with Client(target.grpc, api_key=experiment.api_key) as asking:
            workload = plan(options, model, asking.tokenize)
        sample = workload.requests[: experiment.options.warmup_requests]
        warmup = await _warm_up(client, sample, point.client, model, shift, id_prefix)
        sender = Sender(client, workload, point.client, f"{id_prefix}-")
        server_before_s, client_before_s = target.cpu_s(), time.process_time()
        why = await _send(sender, target, client, tell)
        client_cpu_s = time.process_time() - client_before_s
        server_cpu_s = {name: round(after_s - server_before_s[name], 3) for name, after_s in target.cpu_s().items()}
        if why is None and sender.num_failed:
            why = await last_look(target, client)
    record = TrialRecord(
        trial=trial.name,
        point=trial.point,
        repeat=trial.repeat,
        begun_at=begun_at,
        workload=settings_of(options),
        model=model,
        is_open=workload.is_open,
        offered_per_s=offered_per_s(workload),
        num_planned=sender.num_planned,
        num_clipped=workload.num_clipped,
        num_sent=sender.num_sent,
        num_failed=sender.num_failed,
        num_late=sender.num_late,
        wall_s=wall_s(sender.asked),
        client_cpu_s=client_cpu_s,
        server_cpu_s=server_cpu_s,
        why_incomplete=why,
    )
    return record, sender.asked, warmup


def _check_same_model(before: ModelInfo, now: ModelInfo) -> None:
    """TrialFailed for another model than before: the same path or address may serve another one by now."""
    for name in ("fingerprint", "dtype", "vocab_size", "max_context_tokens"):
        if (was := getattr(before, name)) != (found := getattr(now, name)):
            raise TrialFailed(f"model.{name} was {was} and is {found}; a run goes on as it began")


async def _send(sender: Sender, target: RunTarget, client: AsyncClient, tell: Tell) -> str | None:
    """Sends the workload until all has ended or the server has died: why it ended early, else None."""
    sending = asyncio.create_task(sender.run())
    dying = asyncio.create_task(death(target, client))
    telling = asyncio.create_task(_tell_often(sender, tell))
    try:
        await asyncio.wait((sending, dying), return_when=asyncio.FIRST_COMPLETED)
        if dying.done():
            await sender.stop()
        await sending
        return dying.result() if dying.done() else None
    finally:
        for task in (sending, dying, telling):
            task.cancel()
        await asyncio.wait((sending, dying, telling))
        tell(sender)


async def _tell_often(sender: Sender, tell: Tell) -> None:
    while True:
        tell(sender)
        await asyncio.sleep(TELL_INTERVAL_S)


async def _warm_up(
    client: AsyncClient, sample: Sequence[Planned], options: ClientOptions, model: ModelInfo, shift: int, id_prefix: str
) -> Sequence[ClientRequest]:
    """Sends prompts as long as those of the sample, all at once. TrialFailed if one of them fails."""
    requests = [
        Planned(
            prompt=BlockPrompt(
                blocks=(number,),
                num_tokens=len(planned.prompt),
                block_tokens=len(planned.prompt),
                vocab_size=model.vocab_size,
                seed=WARMUP_SEED + shift,
            ),
            max_tokens=min(planned.max_tokens, MAX_WARMUP_TOKENS),
            at_s=0.0,
        )
        for number, planned in enumerate(sample)
    ]
    sender = Sender(client, Workload(requests=requests), options, f"{id_prefix}-warmup-")
    await sender.run()
    for one in sender.asked:
        if one.outcome != COMPLETED:
            raise TrialFailed(f"warm-up: {one.outcome}: {one.error}")
    return sender.asked


def wall_s(asked: Sequence[ClientRequest]) -> float:
    """Seconds from the intended time of the first request to the end of the last one."""
    if not asked:
        return 0.0
    return (max(one.ended_ns for one in asked) - min(one.intended_ns for one in asked)) / 1e9


def offered_per_s(workload: Workload) -> float | None:
    """Requests per second between the first and the last; None for a closed loop, or where all come at once."""
    times = [planned.at_s for planned in workload.requests if planned.at_s is not None]
    if not workload.is_open or len(times) < 2 or max(times) == min(times):
        return None
    return (len(times) - 1) / (max(times) - min(times))


def _recorded(folder: Path) -> "tuple[pl.DataFrame, pl.DataFrame]":
    """All requests and steps that the trial's server recorded, read after the measurement."""
    try:
        return read_table(folder, REQUESTS), read_table(folder, STEPS)
    except PartsError as error:
        raise TrialFailed(str(error)) from error


def check_ended(target: RunTarget) -> None:
    """TrialFailed where a process was killed: rows that it had not written yet are in no table."""
    if trouble := target.ended_badly():
        raise TrialFailed(f"{' and '.join(trouble)}, so that what was recorded may not be all")


def _check_recorded(asked: Sequence[ClientRequest], recorded: "pl.DataFrame") -> None:
    """TrialFailed where completed requests are missing: a server goes on when its disk is full."""
    known = set(recorded["request_id"])
    num_lost = sum(one.outcome == COMPLETED and one.request_id not in known for one in asked)
    if num_lost:
        raise TrialFailed(f"the server's recording lacks {num_lost} of {len(asked)} requests: see its logs")


def check_steps(requests: "pl.DataFrame", steps: "pl.DataFrame") -> None:
    """TrialFailed where the tables of a server say that steps are missing.

    A worker numbers its steps from 0 up, what it exports and lands from -2 down, and leaves none out; and whoever gave
    a request a token has made a step. What is lost at a worker's end no number tells: see `check_ended`.
    """
    for (worker, *_), of_one in steps.group_by("worker", "epoch"):
        numbers = set(of_one["number"])
        if numbers != {*range(max(numbers) + 1), *range(min(numbers), -1)}:
            raise TrialFailed(f"the recording of {worker} lacks steps: see its logs, and trace.max_bytes")
    recorded = set(steps["epoch"])
    answered = requests.filter(outcome=COMPLETED)
    decoded = answered.filter(answered["completion_tokens"] > answered["num_choices"])  # else the first ones were all
    for epochs, workers in (
        (answered["prefill_epoch"], answered["prefill_worker"]),
        (decoded["decode_epoch"], decoded["decode_worker"]),
    ):
        for epoch, worker in zip(epochs, workers, strict=True):
            if epoch is not None and epoch not in recorded:
                raise TrialFailed(f"the recording of {worker} lacks all of its steps: see its logs")


def _write(path: Path, table: Table, rows: Sequence[Mapping[str, Value]]) -> None:
    columns = [[row[column.name] for row in rows] for column in table.columns]
    write_part(path, encode_part(table, columns, this_process().row()))
