"""A gateway that dies or stands still under load: its workers give up what it asked of them, and serve the next one.

Each moment is drawn from a seed that stands in the test's name, and is counted in tokens that clients have heard.
"""

import random

import pytest

from tests.cluster.conftest import wait_until
from tests.cluster.faults import Fleet
from tests.cluster.streams import Listeners, assert_all_right, assert_right_so_far, draw

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(600)]
NUM_REQUESTS = 16
NUM_MOMENTS = 10


def begin(fleet: Fleet, seed: int) -> Listeners:
    """Load on the gateway until a moment drawn from the seed."""
    rng = random.Random(seed)
    asked = [draw(rng, number) for number in range(NUM_REQUESTS)]
    moment = rng.randrange(int(0.8 * sum(ask.max_tokens for ask in asked)))
    listeners = Listeners(fleet, asked, NUM_REQUESTS // 2)
    assert wait_until(lambda: listeners.num_tokens >= moment, 120), fleet.logs()
    return listeners


def assert_a_killed_gateway_leaves_nothing(fleet: Fleet, seed: int) -> None:
    listeners = begin(fleet, seed)
    fleet.gateway.kill()
    for ask, heard in zip(listeners.asked, listeners.wait(), strict=True):
        assert_right_so_far(ask, heard)  # and none hangs
    fleet.assert_as_it_began()
    fleet.restore()
    again = Listeners(fleet, listeners.asked[:4])
    assert_all_right(again.asked, again.wait())
    fleet.assert_as_it_began()


def test_a_killed_gateway_leaves_nothing_on_its_workers(one_p_two_d):
    assert_a_killed_gateway_leaves_nothing(one_p_two_d, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(400, 400 + NUM_MOMENTS))
def test_a_gateway_killed_at_any_moment_leaves_nothing_on_its_workers(one_p_two_d, seed):
    assert_a_killed_gateway_leaves_nothing(one_p_two_d, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(500, 500 + NUM_MOMENTS))
def test_a_gateway_that_stood_still_loses_no_token(one_p_two_d, seed):
    fleet = one_p_two_d
    listeners = begin(fleet, seed)
    with fleet.gateway.stopped():
        wait_until(lambda: not fleet.remains(), 5)  # workers finish what they were given, or wait for credits
    assert_all_right(listeners.asked, listeners.wait())
    fleet.assert_as_it_began()
