"""Calls that hang until the test lets them go."""

import threading
import time
from collections.abc import Iterator

import pytest

from moonshard.kv.store.mooncake.lanes import Lanes
from tests.kv.store.mooncake.store_blocks import await_that

NAME = "test-lanes"
NUM_LANES = 3


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Ends the calls that wait for it."""
    release = threading.Event()
    yield release
    release.set()


@pytest.fixture
def lanes(release: threading.Event) -> Iterator[Lanes]:
    lanes = Lanes(NUM_LANES, NAME)
    yield lanes
    release.set()
    lanes.close(timeout_s=10.0)
    assert num_threads() == 0


def num_threads() -> int:
    return sum(thread.name.startswith(NAME) for thread in threading.enumerate())


def hang(lanes: Lanes, release: threading.Event) -> int:
    """Gives up a call at once. The lane that it keeps."""
    with lanes.lane(timeout_s=1.0) as lane:
        assert lane is not None
        with pytest.raises(TimeoutError):
            lane.call(release.wait, timeout_s=0.01)
        return lane.index


def test_a_call_gives_what_the_function_returns_or_raises(lanes: Lanes):
    with lanes.lane(timeout_s=1.0) as lane:
        assert lane is not None
        assert lane.call(lambda: threading.current_thread().name, timeout_s=5.0) == f"{NAME}-{lane.index}"
        with pytest.raises(ZeroDivisionError):
            lane.call(lambda: 1 // 0, timeout_s=5.0)
        assert lane.call(lambda: 2, timeout_s=5.0) == 2


def test_one_caller_after_another_needs_one_thread(lanes: Lanes):
    for _ in range(5):
        with lanes.lane(timeout_s=1.0) as lane:
            assert lane is not None
            lane.call(lambda: None, timeout_s=5.0)
    assert num_threads() == 1


def test_as_many_calls_hang_as_there_are_lanes_and_then_nobody_waits(lanes: Lanes, release: threading.Event):
    hung = {hang(lanes, release) for _ in range(NUM_LANES)}
    assert hung == set(range(NUM_LANES))
    assert lanes.are_stuck
    start_s = time.perf_counter()
    with lanes.lane(timeout_s=30.0) as lane:
        assert lane is None
    assert time.perf_counter() - start_s < 10
    assert num_threads() == NUM_LANES


def test_a_lane_is_nobody_elses_before_its_call_has_returned(lanes: Lanes, release: threading.Event):
    hung = hang(lanes, release)
    for _ in range(3):
        with lanes.lane(timeout_s=1.0) as one, lanes.lane(timeout_s=1.0) as other, lanes.lane(timeout_s=0.01) as third:
            assert one is not None
            assert other is not None
            assert third is None
            assert hung not in (one.index, other.index)
    assert not lanes.are_stuck
    release.set()

    def are_all_free() -> bool:
        with lanes.lane(timeout_s=0.0) as one, lanes.lane(timeout_s=0.0) as other, lanes.lane(timeout_s=0.0) as third:
            return None not in (one, other, third)

    await_that(are_all_free)


def test_whoever_waits_for_a_lane_gets_the_next_that_is_free(lanes: Lanes):
    everything = [lanes.lane(timeout_s=1.0) for _ in range(NUM_LANES)]
    for lane in everything:
        lane.__enter__()
    timer = threading.Timer(0.05, lambda: everything[0].__exit__(None, None, None))
    timer.start()
    with lanes.lane(timeout_s=30.0) as lane:
        assert lane is not None
    timer.join()
    for lane in everything[1:]:
        lane.__exit__(None, None, None)


def test_the_last_call_need_not_be_waited_for(lanes: Lanes, release: threading.Event):
    with lanes.lane(timeout_s=1.0) as lane:
        assert lane is not None
        future = lane.start(release.wait)
    assert not future.done()
    release.set()
    assert future.result(timeout=10)


def test_closing_waits_for_what_hangs_no_longer_than_it_is_told_and_its_thread_ends_later(release: threading.Event):
    lanes = Lanes(NUM_LANES, NAME)
    hang(lanes, release)
    start_s = time.perf_counter()
    assert not lanes.close(timeout_s=0.05)
    assert time.perf_counter() - start_s < 10
    with lanes.lane(timeout_s=1.0) as lane:
        assert lane is None
    assert num_threads() == 1
    release.set()
    await_that(lambda: num_threads() == 0)
    assert lanes.close(timeout_s=0.0)
