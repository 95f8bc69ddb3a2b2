"""One cell of the fault matrix: a fault under load, who notices it when, and what it cost whom."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import httpx
import msgspec

from tests.cluster.conftest import wait_until
from tests.cluster.matrix.clients import Asked, Load
from tests.cluster.matrix.deployments.commands import GATEWAYS, MASTER
from tests.cluster.matrix.deployments.deployment import Deployment, held_by
from tests.cluster.matrix.faults import LASTS_S, inflicted

NUM_CLIENTS = 4
CALM_S = 4.0  # before a fault
MANY_TOKENS = 100  # once so many were heard, the load is there
LOOK_S = 0.02
WHOLE_WITHIN_S = 180.0
BEGAN_WITHIN_S = 30.0
PATIENCE_S = 60.0  # of clients; a request that hangs is one that is lost
PATIENCE_FOR_GATEWAYS_S = 2.0  # of clients whose gateway may be gone without a word


class Cell(msgspec.Struct, kw_only=True):
    """Seconds are from the fault on."""

    process: str
    fault: str
    noticed_s: float | None  # when it was given up: a worker by a gateway, a gateway by a client of it
    calm_s: float  # the longest time without a token in the seconds before
    wait_s: float  # from the fault, or later, until it is noticed and undone: of all requests
    whole_s: float | None  # until both gateways have all workers again; None: not within WHOLE_WITHIN_S
    num_requests: int = 0
    num_lost: int = 0
    num_wrong: int = 0
    num_again: int = 0  # attempts that clients gave up
    leaked: dict[str, str] = {}
    others: dict[str, float] = {}  # workers that were given up though nothing had become of them, and when
    wrongs: list[str] = []


@dataclass
class Watch:
    """When each worker was first seen not to be ready, by a gateway that is well.

    And when none had Mooncake Store: one of them leaves it alone for a moment whenever an answer is late.
    """

    deployment: Deployment
    gateway: str
    looks_for_store: bool = False
    gone_s: dict[str, float] = field(default_factory=dict)
    _is_over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator["Watch"]:
        thread = threading.Thread(target=self._look)
        thread.start()
        try:
            yield self
        finally:
            self._is_over.set()
            thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(LOOK_S):
            with suppress(httpx.TransportError):
                states = self.deployment.states(self.gateway, timeout_s=5.0)
                gone = [name for name, state in states.items() if state != "ready"]
                if self.looks_for_store and not self.deployment.num_storing():
                    gone.append(MASTER)
                for name in gone:
                    self.gone_s.setdefault(name, time.monotonic())


def measure(deployment: Deployment, process: str, fault: str, seed: int) -> Cell:
    """AssertionError where the deployment is not whole before it."""
    assert wait_until(deployment.is_whole, WHOLE_WITHIN_S), deployment.log()
    patience_s = PATIENCE_FOR_GATEWAYS_S if process in GATEWAYS else PATIENCE_S
    load = Load([deployment.url(gateway) for gateway in deployment.gateways], NUM_CLIENTS, patience_s)
    well = next(name for name in reversed(deployment.gateways) if name != process)
    watch = Watch(deployment, well, looks_for_store=process == MASTER)
    with watch.running(), load.running(seed):
        assert wait_until(lambda: load.num_tokens > MANY_TOKENS, 120), f"{load.failures()[:3]}\n{deployment.log()}"
        time.sleep(CALM_S)  # what is measured before the fault
        wait_until(lambda: _is_at_work(deployment, process), 20)
        found = _inflict(deployment, load, watch, process, fault)
    _judge(found, load.asked)
    wait_until(lambda: deployment.is_whole() and not held_by(deployment), BEGAN_WITHIN_S)
    found.leaked = held_by(deployment)
    return found


def _inflict(deployment: Deployment, load: Load, watch: Watch, process: str, fault: str) -> Cell:
    """What is seen while the load runs. A gang is known by its leader, whichever member it befalls."""
    worker, machine = deployment.worker_of(process), deployment.machine(process)
    pids = [one.pid for one in machine.processes()]
    watch.gone_s.clear()
    calm_s = load.longest_wait_s(time.monotonic() - CALM_S, time.monotonic())
    begun_s = time.monotonic()

    def noticed_s() -> float | None:
        return load.broken_s(begun_s) if process in GATEWAYS else watch.gone_s.get(worker)

    with inflicted(fault, machine, pids):
        wait_until(lambda: noticed_s() is not None, max(LASTS_S[fault], 10.0 if fault == "kill -9" else 0.0))
        time.sleep(max(0.0, begun_s + LASTS_S[fault] - time.monotonic()))
    over_s = time.monotonic()
    is_back = wait_until(
        lambda: _is_back(deployment, process, pids, fault) and _stays_whole(deployment), WHOLE_WITHIN_S
    )
    whole_s = time.monotonic() - begun_s - deployment.steady_s if is_back else None
    if deployment.machine(process) != machine:
        deployment.restore(machine)
    seen_s = noticed_s()
    return Cell(
        process=process,
        fault=fault,
        noticed_s=None if seen_s is None else seen_s - begun_s,
        calm_s=calm_s,
        wait_s=load.longest_wait_s(begun_s, over_s),
        whole_s=whole_s,
        others={name: when - begun_s for name, when in watch.gone_s.items() if name != worker},
    )


def _judge(cell: Cell, asked: Sequence[Asked]) -> None:
    """What became of each request."""
    lost = [one for one in asked if one.is_lost]
    wrong = [one for one in asked if not one.is_lost and not one.is_right()]
    cell.num_requests, cell.num_lost, cell.num_wrong = len(asked), len(lost), len(wrong)
    cell.num_again = sum(len(one.broken_s) for one in asked)
    cell.wrongs = [one.heard.failure for one in lost] + [one.wrong for one in wrong]


def _is_at_work(deployment: Deployment, process: str) -> bool:
    if process == MASTER:
        return deployment.is_whole()
    if process in GATEWAYS:
        return True
    load = deployment.inspect(deployment.worker_of(process)).load
    return bool(load.num_running or any(load.queued_tokens) or any(load.active_tokens))


def _stays_whole(deployment: Deployment) -> bool:
    return not wait_until(lambda: not deployment.is_whole(), deployment.steady_s)


def _is_back(deployment: Deployment, process: str, pids: Sequence[int], fault: str) -> bool:
    """Whether all is whole, and what was ended runs anew."""
    if not deployment.is_whole():
        return False
    if fault not in ("kill -9", "SIGSTOP"):
        return True
    there = deployment.machine(process).processes()
    return bool(there) and not {one.pid for one in there} & set(pids)
