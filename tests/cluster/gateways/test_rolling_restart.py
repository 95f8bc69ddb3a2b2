"""Everything is replaced under load, one process at a time, as an operator would, and no client's request fails.

Of workers the new one is started first; a gateway has its ports back once the old one has ended. Clients do what a
load balancer does: who is refused before the first token asks the other gateway.
"""

import itertools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import httpx
import pytest

from moonshard.rpc.client import Client
from tests.cluster.conftest import wait_until
from tests.cluster.faults import GANGS, Fleet
from tests.cluster.gateways.registered import Registered, running_registered
from tests.cluster.streams import Ask, Heard, answer, assert_all_right
from tests.engine_room import long_text

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster"), pytest.mark.timeout(600)]
NUM_CLIENTS = 4
MAX_TRIES = 50
TRY_AGAIN_S = 0.1
NUM_BETWEEN = 8  # requests, from one replacement to the next


@dataclass
class Addressed(Fleet):
    """A gateway by its ports alone, whether it runs or not."""

    http_url: str = ""
    grpc_address: str = ""

    def client(self) -> Client:
        return Client(self.grpc_address, timeout_s=120)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.http_url, timeout=120)


@dataclass
class Load:
    """Clients that ask one request after another. What each was told in the end stands in `told`."""

    gateways: Sequence[Fleet]
    told: list[tuple[Ask, Heard]] = field(default_factory=list)
    num_refused: int = 0
    _is_over: threading.Event = field(default_factory=threading.Event)

    def wait_for_more(self) -> None:
        wanted = len(self.told) + NUM_BETWEEN
        assert wait_until(lambda: len(self.told) >= wanted, 120), "no request comes to its end"

    def go_on(self, number: int) -> None:
        """One client's life."""
        random, turns = Random(number), itertools.cycle(self.gateways)
        while not self._is_over.is_set():
            prompt = long_text(random.randint(20, 200), seed=random.randrange(1 << 30))
            ask = Ask(prompt=prompt, max_tokens=random.randint(10, 60), over=random.choice(["grpc", "http"]))
            self.told.append((ask, self._ask(ask, turns)))

    def _ask(self, ask: Ask, turns: Iterator[Fleet]) -> Heard:
        """What is heard from the first gateway that does not refuse it at once."""
        heard = answer(next(turns), ask)
        for _ in range(MAX_TRIES):
            if heard.tokens or not heard.failure:
                break
            self.num_refused += 1
            time.sleep(TRY_AGAIN_S)  # as a client does that was told to come back
            heard = answer(next(turns), ask)
        return heard

    @contextmanager
    def running(self):
        """All have ended after the block."""
        with ThreadPoolExecutor(NUM_CLIENTS) as threads:
            clients = [threads.submit(self.go_on, number) for number in range(NUM_CLIENTS)]
            try:
                yield self
            finally:
                self._is_over.set()
            for client in clients:
                client.result(120)


def addressed(cluster: Registered) -> list[Fleet]:
    return [
        Addressed(cluster.workers, gateway, http_url=gateway.said("http"), grpc_address=gateway.said("grpc"))
        for gateway in cluster.gateways.values()
    ]


def replace_worker(cluster: Registered, role: str) -> None:
    new = cluster.start_worker(f"{role} 1", role)
    new.wait_for("moonshard ready")
    cluster.wait_linked()
    assert cluster.end_worker(f"{role} 0") == 0
    cluster.wait_linked()


def restart_gateway(cluster: Registered, name: str) -> None:
    assert cluster.gateways[name].terminate() == 0
    cluster.start_gateway(name)
    cluster.wait_linked()


@pytest.mark.parametrize("settings", [pytest.param({}, id="processes"), pytest.param(GANGS, id="gangs")])
def test_no_request_fails_while_everything_is_replaced(tmp_path: Path, settings: Mapping[str, object]):
    with running_registered(tmp_path, num_prefill=1, num_decode=1, settings=settings) as cluster:
        with Load(addressed(cluster)).running() as load:
            for role in ("prefill", "decode"):
                load.wait_for_more()
                replace_worker(cluster, role)
            for name in tuple(cluster.gateways):
                load.wait_for_more()
                restart_gateway(cluster, name)
            load.wait_for_more()
        failed = [(heard.failure, len(heard.tokens)) for _, heard in load.told if heard.failure]
        assert not failed, f"{failed}\n{cluster.logs()}"
        assert_all_right(*zip(*load.told, strict=True))
        cluster.seen_by("gateway 0").assert_as_it_began()
