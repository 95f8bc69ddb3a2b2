"""What a person sees of the children, where stderr is no terminal."""

import pytest

from moonshard.serving.deploy.status_pipe import PROGRESS_INTERVAL_S, ProgressThrottle, StatusPrinter
from moonshard.serving.deploy.terminal import TerminalReporter

PROGRESS = [
    *("loading weights", *(f"loading weights {done}/31" for done in range(1, 32))),
    *(f"compiling {done}/12" for done in range(13)),
]
TOLD = ["loading weights", "loading weights 31/31", "compiling 0/12", "compiling 12/12"]


def test_a_quick_start_is_told_by_where_its_phases_begin_and_end(capsys: pytest.CaptureFixture[str]):
    alone, reporter = StatusPrinter(), TerminalReporter()
    for message in PROGRESS:
        alone("progress", {"message": message})
        reporter.event("worker 0", "progress", {"message": message})
        reporter.event("worker 1", "progress", {"message": message})
    alone("ready", {})
    reporter.finish()
    lines = capsys.readouterr().err.splitlines()
    for begin in ("moonshard ", "moonshard: worker 0: ", "moonshard: worker 1: "):
        told = [line.removeprefix(begin) for line in lines if line.startswith(begin)]
        assert told == TOLD + (["ready"] if begin == "moonshard " else [])


def test_a_slow_phase_is_told_every_few_seconds():
    times_s = iter([step * PROGRESS_INTERVAL_S / 4 for step in range(9)])
    throttle = ProgressThrottle(lambda: next(times_s))
    assert [done for done in range(9) if throttle.is_due(f"loading {done}/100")] == [0, 4, 8]


def test_after_the_start_only_the_return_of_a_child_is_told(capsys: pytest.CaptureFixture[str]):
    reporter = TerminalReporter()
    reporter.event("worker 0", "ready", {})
    reporter.finish()
    capsys.readouterr()
    reporter.event("worker 0", "progress", {"message": "loading weights"})
    reporter.event("worker 0", "ready", {})
    assert capsys.readouterr().err == "moonshard: worker 0: ready\n"


def test_a_failure_is_left_to_whoever_decides_what_follows(capsys: pytest.CaptureFixture[str]):
    reporter = TerminalReporter()
    reporter.event("worker 0", "failed", {"message": "no tensor", "exit_code": 2})
    reporter.finish()
    assert capsys.readouterr().err == ""
