"""What a person sees of the children, where stderr is no terminal."""

import pytest

from moonshard.serving.terminal import TerminalReporter


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
