"""What a trial records of itself: seconds of what was measured, and of nothing that it waited for besides."""

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from moonshard.experiments.common.running.deployment import Process
from moonshard.experiments.runner.experiment import load_experiment
from moonshard.experiments.runner.sweep import Trial
from moonshard.experiments.runner.target import RunTarget
from moonshard.experiments.runner.trial import TrialFailed, check_ended, check_steps, measure, seed_shift
from tests.experiments.runner.scripted import REFUSED, Scripted, listening
from tests.experiments.runner.test_experiment import BASE, folder


async def test_seconds_are_those_of_the_requests_alone(tmp_path: Path):
    """One is refused, so that the server is looked after for a second more: that is nobody's time."""
    sets = (f"workload.prompt_tokens={REFUSED}", "workload.num_requests=1", "warmup_requests=0")
    asked = load_experiment(folder(tmp_path, BASE), sets)
    async with listening(Scripted()) as address:
        target = RunTarget(grpc=address, processes={})
        begun_s = time.perf_counter()
        record, (refused,), _ = await measure(asked, Trial(repeat=0, point=0), "x", target, lambda _: None)
        elapsed_s = time.perf_counter() - begun_s
    assert (record.num_sent, record.num_failed, record.why_incomplete) == (1, 1, None)
    assert record.wall_s == pytest.approx((refused.ended_ns - refused.intended_ns) / 1e9)
    assert elapsed_s - record.wall_s > 0.9
    assert record.client_cpu_s < 1


def test_repeats_have_other_requests_and_a_server_that_keeps_its_cache_gets_them_once(tmp_path: Path):
    text = BASE + "[sweep]\nworkload.rate_per_s = [1, 2]\n"
    started, running = (load_experiment(folder(tmp_path, text), (), url) for url in (None, "127.0.0.1:1"))
    trials = [Trial(repeat=repeat, point=point) for repeat in (0, 1) for point in (0, 1)]
    assert [seed_shift(started, trial, f"stamp-1-{trial.name}") for trial in trials] == [0, 0, 1, 1]
    names = [f"{stamp}-{start}-{trial.name}" for stamp in "ab" for start in (1, 2) for trial in trials]
    shifts = [seed_shift(running, trials[0], name) for name in names]
    assert len(set(shifts)) == len(names)
    assert seed_shift(running, trials[0], names[0]) == shifts[0]


ENDS_WITH = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit({})); print('ready', flush=True)"


@pytest.mark.parametrize(
    ("code", "is_killed", "said"),
    [(0, True, "two had to be killed at the end"), (1, False, "two ended with code 1")],
)
def test_a_process_that_did_not_end_well_is_named_and_the_trial_fails(
    tmp_path: Path, code: int, is_killed: bool, said: str
):
    processes = {name: Process(name=name, log_path=tmp_path / name, environment=os.environ) for name in ("one", "two")}
    for process, own in zip(processes.values(), (0, code), strict=True):
        process.start([sys.executable, "-c", f"{ENDS_WITH.format(own)}; signal.pause()"])
        process.wait_for("ready")
    target = RunTarget(grpc="127.0.0.1:1", processes=processes)
    assert target.ended_badly() == []
    processes["one"].stop()
    check_ended(target)
    if is_killed:
        processes["two"].kill()
    else:
        processes["two"].stop()
    with pytest.raises(TrialFailed, match=f"^{said}"):
        check_ended(target)


def recorded(numbers: Sequence[int], epoch: str = "d") -> pl.DataFrame:
    return pl.DataFrame({"worker": "w", "epoch": epoch, "number": numbers}, schema_overrides={"number": pl.Int64})


def answered(**told: object) -> pl.DataFrame:
    """One request, decoded by `d`, and prefilled by no worker that records unless told otherwise."""
    known = {
        **{"outcome": "completed", "completion_tokens": 2, "num_choices": 1},
        **{"prefill_epoch": None, "prefill_worker": None, "decode_epoch": "d", "decode_worker": "here:1"},
    }
    return pl.DataFrame([{**known, **told}])


@pytest.mark.parametrize(
    ("requests", "numbers"),
    [
        (answered(), [0, 1, 2]),
        (answered(), [2, -2, 0, -3, 1]),
        (answered(decode_epoch="other", completion_tokens=1), [0]),  # its first token was its last
        (answered(decode_epoch="other", outcome="cancelled"), [0]),
    ],
)
def test_steps_that_are_all_there_pass_in_any_order(requests: pl.DataFrame, numbers: Sequence[int]):
    check_steps(requests, recorded(numbers))


@pytest.mark.parametrize(
    ("requests", "numbers", "said"),
    [
        (answered(), [0, 2], "of w lacks steps"),
        (answered(), [1, 2], "of w lacks steps"),
        (answered(), [0, 1, -3], "of w lacks steps"),
        (answered(decode_epoch="other"), [0, 1], "of here:1 lacks all of its steps"),
        (answered(prefill_epoch="p", prefill_worker="there:2"), [0, 1], "of there:2 lacks all of its steps"),
    ],
)
def test_steps_that_are_missing_fail_the_trial(requests: pl.DataFrame, numbers: Sequence[int], said: str):
    with pytest.raises(TrialFailed, match=said):
        check_steps(requests, recorded(numbers))


@pytest.mark.parametrize("name", ["fingerprint", "dtype", "vocab_size", "max_context_tokens"])
async def test_a_run_does_not_go_on_with_another_model(tmp_path: Path, name: str):
    asked = load_experiment(folder(tmp_path, BASE), ("workload.num_requests=1", "warmup_requests=0"))
    scripted = Scripted()
    scripted.opened.set()
    trial = Trial(repeat=0, point=0)
    async with listening(scripted) as address:
        target = RunTarget(grpc=address, processes={})
        record, *_ = await measure(asked, trial, "x", target, lambda _: None)
        before = replace(record.model, **{name: 1})
        with pytest.raises(
            TrialFailed, match=rf"^model\.{name} was 1 and is {getattr(record.model, name)}; a run goes"
        ):
            await measure(asked, trial, "x", target, lambda _: None, before)
        await measure(asked, trial, "x", target, lambda _: None, record.model)
    assert len(scripted.came) == 2


async def test_a_server_that_ran_already_and_goes_away_ends_the_trial_with_what_it_has(tmp_path: Path):
    """One client asks one after the other: once the third request has come, the first two have been answered."""
    sets = ("workload.num_requests=50000", "workload.num_clients=1", "warmup_requests=0")
    scripted = Scripted()
    scripted.opened.set()
    scripted.awaited = 3
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(listening(scripted))
        asked = load_experiment(folder(tmp_path, BASE), sets, address)
        trial = Trial(repeat=0, point=0)
        measuring = asyncio.create_task(measure(asked, trial, "x", RunTarget(grpc=address), lambda _: None))
        await scripted.all_came.wait()
    record, rows, _ = await measuring
    assert record.why_incomplete == f"the server at {address} is not there any more"
    assert len(rows) == record.num_sent < record.num_planned
    assert [one.outcome for one in rows][:2] == ["completed"] * 2
    assert record.num_failed == sum(one.outcome != "completed" for one in rows) > 0
