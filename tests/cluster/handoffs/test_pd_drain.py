"""A worker that is told to end, under load: it says so first, takes nothing new, and no client notices."""

from collections.abc import Iterator

import pytest

from tests.cluster.conftest import wait_until
from tests.cluster.faults import Fleet, Process, is_serving, running_fleet
from tests.cluster.streams import Ask, Listeners, assert_all_right
from tests.engine_room import long_text

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), num_prefill=2, num_decode=2) as fleet:
        yield fleet


def asks(num_asks: int, num_prompt: int, max_tokens: int) -> list[Ask]:
    return [
        Ask(prompt=long_text(num_prompt, seed=number), max_tokens=max_tokens, over="http" if number % 2 else "grpc")
        for number in range(num_asks)
    ]


def begin_drain(fleet: Fleet, worker: Process) -> None:
    """SIGTERM; returns when the gateway knows. Health says so while the process still runs."""
    worker.running.terminate()
    assert wait_until(lambda: not is_serving(worker.address), 10)
    assert worker.is_alive, "it ended before it said so"
    assert wait_until(lambda: fleet.metric("moonshard_draining", worker=worker.address) == 1, 10)


def test_a_decode_worker_that_drains_finishes_what_runs_and_gets_nothing_new(fleet):
    leaving, staying = fleet["decode 0"], fleet["decode 1"]
    running = Listeners(fleet, asks(8, 40, max_tokens=600))
    assert wait_until(lambda: all(heard.tokens for heard in running.heard), 60)
    begin_drain(fleet, leaving)
    labels = {name: fleet.label_of(worker) for name, worker in (("leaving", leaving), ("staying", staying))}
    before = {name: fleet.metric("moonshard_request_handoffs_total", engine=label) for name, label in labels.items()}
    assert all(before.values()), "both had work before"
    new = Listeners(fleet, asks(8, 100, max_tokens=30))
    assert_all_right(new.asked, new.wait())
    after = {name: fleet.metric("moonshard_request_handoffs_total", engine=label) for name, label in labels.items()}
    assert after == {"leaving": before["leaving"], "staying": before["staying"] + 8}
    assert_all_right(running.asked, running.wait())
    assert leaving.running.wait(60) == 0
    fleet.restore()
    fleet.assert_as_it_began()


def test_a_prefill_worker_that_drains_publishes_what_it_began(fleet):
    leaving = fleet["prefill 0"]
    running = Listeners(fleet, asks(24, 700, max_tokens=10), num_clients=8)
    assert wait_until(lambda: running.num_tokens >= 10, 60)
    leaving.running.terminate()
    assert_all_right(running.asked, running.wait())
    assert leaving.running.wait(60) == 0
    local = fleet.metric("moonshard_local_prefills_total")
    assert local == 0, "the other prefill worker was there all the time"
    fleet.restore()
    fleet.assert_as_it_began()


def test_a_gateway_that_drains_lets_its_streams_finish(fleet):
    running = Listeners(fleet, asks(6, 300, max_tokens=300))
    assert wait_until(lambda: all(heard.tokens for heard in running.heard), 60)
    assert fleet.gateway.terminate() == 0
    assert_all_right(running.asked, running.wait())
    fleet.restore()
    fleet.assert_as_it_began()
