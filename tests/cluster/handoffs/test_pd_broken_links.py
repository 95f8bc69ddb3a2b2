"""Links that break while the processes at both ends live on: no request is lost, none is served twice."""

import random
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.cluster.conftest import wait_until
from tests.cluster.faults import SILENCE_S, Fleet, running_fleet
from tests.cluster.handoffs.cuttable import Cuttable, cuttable
from tests.cluster.streams import Listeners, assert_all_right, draw

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster"), pytest.mark.timeout(300)]
NUM_CLIENTS = 8
NUM_REQUESTS = 24
NUM_CUTS = 3


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, dict[str, Cuttable]]]:
    """One prefill worker and two that decode, each behind a proxy."""
    with ExitStack() as proxies:
        by_address: dict[str, Cuttable] = {}

        def through(address: str) -> str:
            by_address[address] = proxies.enter_context(cuttable(address))
            return by_address[address].address

        folder = tmp_path_factory.mktemp("fleet")
        with running_fleet(folder, num_prefill=1, num_decode=2, through=through) as fleet:
            yield fleet, {name: by_address[worker.address] for name, worker in fleet.workers.items()}


def all_linked(fleet: Fleet) -> bool:
    return fleet.metric("moonshard_worker_up") == len(fleet.workers)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("victim", ["prefill 0", "decode 0"])
def test_a_link_that_breaks_loses_and_doubles_nothing(linked, victim, seed):
    fleet, proxies = linked
    rng = random.Random(seed)
    listeners = Listeners(fleet, [draw(rng, number) for number in range(NUM_REQUESTS)], NUM_CLIENTS)
    num_tokens = sum(ask.max_tokens for ask in listeners.asked)
    for moment in sorted(rng.randrange(int(0.9 * num_tokens)) for _ in range(NUM_CUTS)):
        assert wait_until(lambda at=moment: listeners.num_tokens >= at, 60)
        proxies[victim].cut()
        assert wait_until(lambda: all_linked(fleet), 30)
    assert_all_right(listeners.asked, listeners.wait())
    assert fleet.metric("moonshard_worker_restarts_total") == 0, "the same process answered again"
    fleet.assert_as_it_began()


@pytest.mark.parametrize("victim", ["prefill 0", "decode 1"])
def test_a_link_on_which_nothing_passes_is_a_lost_worker(linked, victim):
    fleet, proxies = linked
    rng = random.Random(7)
    listeners = Listeners(fleet, [draw(rng, number) for number in range(NUM_REQUESTS)], NUM_CLIENTS)
    assert wait_until(lambda: listeners.num_tokens > 100, 60)
    with proxies[victim].silent():
        assert wait_until(lambda: not all_linked(fleet), SILENCE_S + 30)
        assert_all_right(listeners.asked, listeners.wait())
    assert wait_until(lambda: all_linked(fleet), 60)
    fleet.assert_as_it_began()
