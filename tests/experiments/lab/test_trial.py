"""What a trial records of itself: seconds of what was measured, and of nothing that it waited for besides."""

import os
import sys
from pathlib import Path

import pytest

from moonshard.experiments.bench.deployment import Process
from moonshard.experiments.lab.experiment import load_experiment
from moonshard.experiments.lab.sweep import Trial
from moonshard.experiments.lab.target import Target
from moonshard.experiments.lab.trial import TrialFailed, check_ended, measure, seed_shift
from tests.experiments.lab.scripted import REFUSED, Scripted, listening
from tests.experiments.lab.test_experiment import BASE, folder


async def test_seconds_are_those_of_the_requests_alone(tmp_path: Path):
    """One is refused, so that the server is looked after for a second more: that is nobody's time."""
    sets = (f"workload.prompt_tokens={REFUSED}", "workload.num_requests=1", "warmup_requests=0")
    asked = load_experiment(folder(tmp_path, BASE), sets)
    async with listening(Scripted()) as address:
        target = Target(grpc=address, processes={})
        record, (refused,), _ = await measure(asked, Trial(repeat=0, point=0), "x", target, lambda _: None)
    assert (record.num_sent, record.num_failed, record.why_incomplete) == (1, 1, None)
    assert record.wall_s == pytest.approx((refused.ended_ns - refused.intended_ns) / 1e9)
    assert record.wall_s < 0.1
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


def test_a_process_that_had_to_be_killed_is_named_and_the_trial_fails(tmp_path: Path):
    processes = {name: Process(name=name, log_path=tmp_path / name, environment=os.environ) for name in ("one", "two")}
    for process in processes.values():
        process.start([sys.executable, "-c", "import signal; print('ready', flush=True); signal.pause()"])
        process.wait_for("ready")
    target = Target(grpc="127.0.0.1:1", processes=processes)
    assert target.killed() == []
    processes["one"].stop()
    check_ended(target)
    processes["two"].kill()
    with pytest.raises(TrialFailed, match=r"^two had to be killed at the end"):
        check_ended(target)
