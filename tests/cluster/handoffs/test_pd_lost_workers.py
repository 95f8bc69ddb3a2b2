"""Workers that die or stand still under load: with another one, clients do not notice; without, they are told at once.

Each moment is drawn from a seed that stands in the test's name, and is counted in tokens that clients have heard.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from tests.cluster.conftest import wait_until
from tests.cluster.faults import SILENCE_S, Fleet, Lateness, running_fleet
from tests.cluster.streams import (
    Ask,
    Heard,
    Listeners,
    answer,
    assert_all_right,
    assert_right,
    assert_right_so_far,
    draw,
)
from tests.engine_room import long_text

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(600)]
NUM_CLIENTS = 8
NUM_REQUESTS = 16  # of all clients, so that some are being prefilled at any moment
FAILOVER_S = 2.0
NOTICED_S = {"kill": 0.0, "stop": SILENCE_S * 9 / 8}  # silence is counted in eighths
NUM_MOMENTS = 10
NUM_TRIES = 3


@pytest.fixture(scope="module")
def two_p_one_d(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), num_prefill=2, num_decode=1) as fleet:
        yield fleet


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A worker lost under load, at `lost_s` of the monotonic clock, and what clients heard all the while."""

    listeners: Listeners
    heard: list[Heard]
    lost_s: float
    num_moved: float  # requests that went on elsewhere

    @property
    def met_a_request(self) -> bool:
        return self.num_moved > 0 or any(each.failure for each in self.heard)


def under_load(fleet: Fleet, victim: str, fault: str, seed: int) -> Loss:
    """Load, with the fault at a moment drawn from the seed. The victim is back and linked afterwards.

    The worker's last request may end before the fault. Such a fault shows nothing, and all is asked again, for one that
    comes earlier. A worker that only prefills may be lost unnoticed.
    """
    rng = random.Random(seed)
    asked = [draw(rng, number) for number in range(NUM_REQUESTS)]
    moment = rng.randrange(int(0.8 * sum(ask.max_tokens for ask in asked)))
    for _ in range(NUM_TRIES):
        loss = lose(fleet, victim, fault, asked, moment)
        if "prefill" in victim or loss.met_a_request:
            return loss
        moment //= 2
    raise AssertionError(f"{NUM_TRIES} faults met no request\n{fleet.logs()}")


def lose(fleet: Fleet, victim: str, fault: str, asked: list[Ask], moment: int) -> Loss:
    num_before = fleet.metric("moonshard_request_retries_total")
    listeners = Listeners(fleet, asked, NUM_CLIENTS)
    assert wait_until(lambda: listeners.are_done or (listeners.num_tokens >= moment and is_met(fleet, victim)), 120), (
        fleet.logs()
    )
    lost_s = time.monotonic()
    if fault == "kill":
        fleet[victim].kill()
        heard = listeners.wait()
    else:
        with fleet[victim].stopped():
            heard = listeners.wait()
            assert wait_until(lambda: fleet.metric("moonshard_worker_up") == len(fleet.workers) - 1, 30)
    fleet.restore()
    num_moved = fleet.metric("moonshard_request_retries_total") - num_before
    return Loss(listeners=listeners, heard=heard, lost_s=lost_s, num_moved=num_moved)


def is_met(fleet: Fleet, victim: str) -> bool:
    """Whether a request would be affected if that worker were lost now."""
    return "prefill" in victim or fleet.metric("moonshard_reserved_tokens", worker=fleet[victim].address) > 0


def assert_unnoticed(fleet: Fleet, victim: str, fault: str, seed: int) -> None:
    with Lateness(fleet) as lateness:
        loss = under_load(fleet, victim, fault, seed)
    assert_all_right(loss.listeners.asked, loss.heard)
    stalls_s = [each.longest_gap_s for each in loss.heard]
    p50_s, p99_s = np.percentile(stalls_s, [50, 99])
    told = f"{loss.num_moved:g} requests moved; longest gap p50 {p50_s:.3f} s, p99 {p99_s:.3f} s"
    print(f"{victim} {fault} seed {seed}: {told}; the gateway late by {lateness.longest_s:.3f} s")  # noqa: T201
    recomputed_s = recomputation_s(fleet, loss.listeners.asked)
    assert max(stalls_s) < NOTICED_S[fault] + FAILOVER_S + recomputed_s + lateness.longest_s
    fleet.assert_as_it_began()


def recomputation_s(fleet: Fleet, asked: tuple[Ask, ...]) -> float:
    """The control: how long the same prompts take to their first token, all at once and undisturbed."""
    begun_s = time.monotonic()
    heard = Listeners(fleet, asked[:NUM_CLIENTS]).wait()
    return max(each.arrivals_s[0] - begun_s for each in heard)


@pytest.mark.parametrize("fault", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("victim", "seed"),
    [("decode 0", 1), pytest.param("prefill 0", 2, marks=pytest.mark.slow)],  # `test_pd_late_writes` kills one, too
)
def test_a_lost_worker_is_not_noticed_where_another_can_decode(one_p_two_d, victim, seed, fault):
    assert_unnoticed(one_p_two_d, victim, fault, seed)


@pytest.mark.alone
@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.parametrize("seed", range(100, 100 + NUM_MOMENTS))
@pytest.mark.parametrize("victim", ["decode 0", "decode 1", "prefill 0"])
def test_a_lost_worker_of_three_is_not_noticed_at_any_moment(one_p_two_d, victim, seed, fault):
    assert_unnoticed(one_p_two_d, victim, fault, seed)


@pytest.mark.alone
@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.parametrize("seed", range(200, 200 + NUM_MOMENTS))
@pytest.mark.parametrize("victim", ["prefill 0", "prefill 1"])
def test_a_lost_prefill_worker_of_two_is_not_noticed_at_any_moment(two_p_one_d, victim, seed, fault):
    assert_unnoticed(two_p_one_d, victim, fault, seed)


@pytest.mark.alone
@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.parametrize("seed", range(300, 300 + NUM_MOMENTS))
def test_without_another_decode_worker_every_client_is_told_in_time_to_try_later(two_p_one_d, seed, fault):
    fleet = two_p_one_d
    with Lateness(fleet) as lateness:
        loss = under_load(fleet, "decode 0", fault, seed)
    asked = loss.listeners.asked
    for ask, each in zip(asked, loss.heard, strict=True):
        if not each.failure:
            assert_right(ask, each)
            continue
        assert each.failure == "service_unavailable"
        assert each.retry_after_s is None or each.retry_after_s > 0  # an event within a stream carries no header
        assert each.ended_s - loss.lost_s < NOTICED_S[fault] + FAILOVER_S + lateness.longest_s
        assert_right_so_far(ask, each)
    assert_right(asked[0], answer(fleet, asked[0]))
    fleet.assert_as_it_began()


def test_a_killed_decode_worker_comes_back_as_another_and_serves(one_p_two_d):
    fleet = one_p_two_d
    others = [fleet["prefill 0"], fleet["decode 1"]]
    fleet["decode 0"].kill()
    fleet["decode 0"].restart()
    assert wait_until(lambda: fleet.metric("moonshard_worker_up") == 3, 30), fleet.logs()
    with others[1].stopped():
        asks = [Ask(prompt=long_text(300, seed=number), max_tokens=40) for number in range(2)]
        assert_all_right(asks, Listeners(fleet, asks).wait())
    fleet.restore()
    fleet.assert_as_it_began()


def test_where_nobody_decodes_new_requests_are_refused_with_retry_after_and_later_served(one_p_two_d):
    fleet = one_p_two_d
    for name in ("decode 0", "decode 1"):
        fleet[name].kill()
    assert wait_until(lambda: fleet.metric("moonshard_worker_up") == 1, 30)
    for over in ("grpc", "http"):
        refused = answer(fleet, Ask(prompt=[1, 2, 3], max_tokens=4, over=over))
        assert (refused.failure, refused.tokens) == ("service_unavailable", [])
        assert (refused.retry_after_s or 0) > 0
    fleet.restore()
    ask = Ask(prompt=long_text(100), max_tokens=20)
    assert_right(ask, answer(fleet, ask))
    fleet.assert_as_it_began()
