"""What is told of a start is what happened, and arrives through the status pipe and on the terminal as it was told."""

import threading

import msgspec
import pytest

from moonshard.serving.deploy.terminal import TerminalReporter
from moonshard.serving.deploy.timings import StartPhase, Timings, nested, phases_told, since_process_began_s


def test_phases_are_in_the_order_in_which_they_began_each_within_the_one_around_it():
    timings = Timings()
    begun_s = timings.now_s
    with timings.phase("outer"), timings.phase("inner", "8"):
        pass
    timings.note("earlier", 0.0)
    earlier, outer, inner = timings.phases
    assert (earlier.name, outer.name, inner.name, inner.detail) == ("earlier", "outer", "inner", "8")
    assert earlier.begun_s == 0.0
    assert begun_s <= outer.begun_s <= inner.begun_s
    assert inner.begun_s + inner.took_s <= outer.begun_s + outer.took_s <= timings.now_s
    assert earlier.took_s >= outer.begun_s


def test_a_phase_that_fails_is_told_too():
    timings = Timings()
    with pytest.raises(KeyError), timings.phase("weights"):
        raise KeyError
    assert [phase.name for phase in timings.phases] == ["weights"]


def test_parts_that_took_turns_are_told_one_behind_the_other():
    timings = Timings()
    timings.divide(2.0, reading=0.5, placing=0.25)
    assert timings.phases == (StartPhase("reading", "", 2.0, 0.5), StartPhase("placing", "", 2.5, 0.25))


def test_times_count_from_the_beginning_of_the_process():
    before_s = since_process_began_s()
    now_s = Timings().now_s
    assert 0 < before_s <= now_s + 0.02  # the kernel tells hundredths
    assert now_s <= since_process_began_s() + 0.02


def test_many_threads_may_tell():
    timings = Timings()

    def tell() -> None:
        for _ in range(100):
            with timings.phase("load"):
                pass

    threads = [threading.Thread(target=tell) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(timings.phases) == 400


def test_what_was_told_arrives_and_what_has_another_form_is_left_out():
    timings = Timings()
    timings.note("imports", 0.0)
    (imports,) = timings.phases
    fields = msgspec.json.decode(msgspec.json.encode({"timings": [*timings.told(), ["short"], 7, ["a", 1, 2, 3]]}))
    (found,) = phases_told(fields)
    assert (found.name, found.begun_s) == ("imports", 0.0)
    assert found.took_s == pytest.approx(imports.took_s, abs=1e-4)
    assert phases_told({}) == phases_told({"timings": None}) == []


@pytest.mark.parametrize("has_timings", [True, False])
def test_a_table_for_each_process_is_shown_where_it_was_asked_for(
    has_timings: bool, capsys: pytest.CaptureFixture[str]
):
    reporter = TerminalReporter(has_timings=has_timings)
    reporter.event("prefill 0", "timings", {"timings": [["load", "draw", 1234.5, 67.0]]})
    reporter.finish()
    reporter.show_timings([StartPhase("interpreter", "", 0.0, 0.2)])
    shown = capsys.readouterr().err
    for text in ("start of serve", "start of prefill 0", "1.23", "load draw", "interpreter"):
        assert (text in shown) is has_timings


def test_phases_are_told_as_they_lie_within_one_another():
    spans = [("all", 0.0, 9.0), ("load", 1.0, 4.0), ("read", 1.0, 2.0), ("place", 3.0, 2.0), ("beside", 4.5, 3.0)]
    drawn = [StartPhase(name, "", begun_s, took_s) for name, begun_s, took_s in reversed(spans)]
    assert [(phase.name, depth) for phase, depth in nested(drawn)] == [
        ("all", 0),
        ("load", 1),
        ("read", 2),
        ("place", 2),
        ("beside", 1),
    ]
