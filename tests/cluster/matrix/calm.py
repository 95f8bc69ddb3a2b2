"""Nothing becomes of anybody, and the machine has more to do than it can: whether anybody is given up all the same."""

import time
from contextlib import ExitStack

import msgspec

from tests.cluster.conftest import wait_until
from tests.cluster.matrix.cell import BEGAN_WITHIN_S, PATIENCE_S, WHOLE_WITHIN_S, Watch
from tests.cluster.matrix.clients import Load
from tests.cluster.matrix.deployments.deployment import Deployment, held_by

NUM_CLIENTS = 12  # more than there are slots for


class Calm(msgspec.Struct, kw_only=True):
    lasted_s: float
    num_requests: int
    num_tokens: int
    num_lost: int
    num_wrong: int
    wait_s: float  # the longest time without a token, of all requests
    alarms: dict[str, float]  # workers that a gateway gave up, and when
    num_restarted: int  # leaders
    leaked: dict[str, str]
    wrongs: list[str] = []


def measure(deployment: Deployment, lasts_s: float, seed: int) -> Calm:
    before = _pids(deployment)
    load = Load([deployment.url(gateway) for gateway in deployment.gateways], NUM_CLIENTS, PATIENCE_S)
    watches = [Watch(deployment, gateway) for gateway in deployment.gateways]
    begun_s = time.monotonic()
    with ExitStack() as running:
        for watch in watches:
            running.enter_context(watch.running())
        running.enter_context(load.running(seed))
        time.sleep(lasts_s)  # what is measured
        over_s = time.monotonic()
    asked = load.asked
    whole = [one for one in asked if not one.is_lost]
    assert wait_until(deployment.is_whole, WHOLE_WITHIN_S)
    wait_until(lambda: not held_by(deployment), BEGAN_WITHIN_S)
    wrong = [one for one in whole if not one.is_right()]
    return Calm(
        lasted_s=over_s - begun_s,
        num_requests=len(asked),
        num_tokens=sum(len(one.heard.tokens) for one in asked),
        num_lost=len(asked) - len(whole),
        num_wrong=len(wrong),
        wait_s=load.longest_wait_s(begun_s, over_s),
        alarms={name: when - begun_s for watch in watches for name, when in watch.gone_s.items()},
        num_restarted=len(_pids(deployment) - before),
        leaked=held_by(deployment),
        wrongs=[one.wrong for one in wrong] + [one.heard.failure for one in asked if one.is_lost],
    )


def _pids(deployment: Deployment) -> set[int]:
    """Of all workers' leaders: a gang that was ended has another."""
    return {process.pid for name in deployment.leaders for process in deployment.machine(name).processes()}
