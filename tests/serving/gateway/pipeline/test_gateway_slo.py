"""A request that would wait too long for its first token is refused at once, and told how long it would have been."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from moonshard.rpc.client import AsyncClient
from moonshard.rpc.status import Overloaded
from moonshard.serving.config.keys import GatewayConfig, RoutingConfig
from moonshard.serving.control.ttft.bound import AUTO_STRETCH, AUTO_WAIT_S
from moonshard.serving.control.ttft.forecast import LEAST_TTFT_S
from moonshard.serving.control.ttft.model import MIN_SAMPLES, TtftModel
from moonshard.serving.gateway.process import RunningGateway, serving
from moonshard.serving.gateway.records.accounts.ledger import read_ledger
from tests.serving.gateway import fake_worker
from tests.serving.gateway.conftest import make_config
from tests.serving.gateway.fake_worker import FakeWorker
from tests.serving.gateway.workers.fleet import until

PREDICTED = "x-moonshard-predicted-ttft-ms"
BODY = {"prompt": [1, 2, 3], "max_tokens": 2}
NUM_BEFORE = 5  # tokens queued where one of these is: its prompt and what it may answer


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def gateway_config(gateway_config: GatewayConfig, ledger: Path) -> GatewayConfig:
    return replace(gateway_config, ledger=ledger)


@pytest.fixture
def routing() -> RoutingConfig:
    """An SLO that no first token can meet: a microsecond."""
    return RoutingConfig(ttft_slo_s=1e-6)


@pytest.fixture
async def running(
    worker: FakeWorker, gateway_config: GatewayConfig, model_path: Path, routing: RoutingConfig
) -> AsyncIterator[RunningGateway]:
    async with fake_worker.serving(worker) as port:
        config = make_config(gateway_config, model_path, [f"127.0.0.1:{port}"])
        async with serving(replace(config, routing=routing)) as running:
            await running.gateway.pool.wait_ready()
            yield running


def model_of(running: RunningGateway) -> TtftModel:
    return running.gateway.pool.knowledge.dispatcher.forecast.model


def teach(running: RunningGateway, ttft_s: float) -> None:
    """Makes the router believe that every prompt so far took that long."""
    (link,) = running.gateway.pool.links
    model_of(running).forget(link.address)
    for number in range(MIN_SAMPLES):
        model_of(running).observe(link.address, own_tokens=1 + number % 3, queued_tokens=0, ttft_s=ttft_s)


async def learn(http: httpx.AsyncClient) -> None:
    for _ in range(MIN_SAMPLES):
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200


@asynccontextmanager
async def one_before(http: httpx.AsyncClient, worker: FakeWorker) -> AsyncIterator[None]:
    """During the block another request is queued before anyone who comes."""
    worker.script.may_step.clear()
    num_before = len(worker.runs)
    first = asyncio.create_task(http.post("/v1/completions", json=BODY))
    await worker.seen(num_before + 1)
    yield
    worker.script.may_step.set()
    assert (await first).status_code == 200


async def test_a_request_behind_others_is_refused_and_one_that_comes_first_is_not(
    http: httpx.AsyncClient, grpc_client: AsyncClient, worker: FakeWorker, running: RunningGateway
):
    await learn(http)
    async with one_before(http, worker):
        assert (await http.post("/v1/completions", json=BODY)).status_code == 429
        teach(running, ttft_s=2.5)
        refused = await http.post("/v1/completions", json=BODY)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert (refused.headers["retry-after"], refused.headers[PREDICTED]) == (
            "5",
            "2500",
        )  # after another that was refused
        with pytest.raises(Overloaded, match="the first token would take"):
            await grpc_client.generate([1, 2, 3], max_tokens=2)
        assert len(worker.runs) == MIN_SAMPLES + 1
    assert (await http.post("/v1/completions", json=BODY)).status_code == 200
    assert 'reason="ttft_slo"} 3.0' in (await http.get("/metrics")).text


async def test_what_is_refused_leaves_no_row_no_tokens_and_no_session_behind(
    http: httpx.AsyncClient, worker: FakeWorker, running: RunningGateway, ledger: Path
):
    await learn(http)
    session, (address,) = {"x-session-affinity": "a session"}, (link.address for link in running.gateway.pool.links)
    async with one_before(http, worker):
        num_tokens = running.gateway.pool.in_flight_tokens(address)
        assert (await http.post("/v1/completions", json=BODY, headers=session)).status_code == 429
        assert running.gateway.pool.in_flight_tokens(address) == num_tokens > 0
    answers = [await http.post("/v1/completions", json=BODY, headers=session) for _ in range(2)]
    assert [answer.headers["x-moonshard-affinity"] for answer in answers] == ["miss", "hit"]
    num_served = MIN_SAMPLES + 1 + len(answers)
    await until(lambda: len(list(read_ledger(ledger))) >= num_served)
    assert [row.outcome for row in read_ledger(ledger)] == ["length"] * num_served


def teach_queue(running: RunningGateway, *, alone_s: float, queued_token_s: float) -> None:
    """Makes the router believe that every token queued before a prompt took that long."""
    (link,) = running.gateway.pool.links
    model_of(running).forget(link.address)
    for queued in range(MIN_SAMPLES):
        model_of(running).observe(
            link.address, own_tokens=3, queued_tokens=queued, ttft_s=alone_s + queued * queued_token_s
        )


class TestByDefault:
    @pytest.fixture
    def routing(self) -> RoutingConfig:
        return RoutingConfig()

    @pytest.mark.parametrize(
        ("alone_s", "queued_token_s", "status"),
        [
            (0.01, 0.9 * AUTO_WAIT_S / NUM_BEFORE, 200),
            (0.01, 1.1 * AUTO_WAIT_S / NUM_BEFORE, 429),
            (AUTO_WAIT_S, 0.9 * AUTO_STRETCH * AUTO_WAIT_S / NUM_BEFORE, 200),
            (AUTO_WAIT_S, 1.1 * AUTO_STRETCH * AUTO_WAIT_S / NUM_BEFORE, 429),
        ],
    )
    async def test_only_who_would_wait_long_for_others_is_refused(
        self,
        http: httpx.AsyncClient,
        worker: FakeWorker,
        running: RunningGateway,
        alone_s: float,
        queued_token_s: float,
        status: int,
    ):
        async with one_before(http, worker):
            teach_queue(running, alone_s=alone_s, queued_token_s=queued_token_s)
            asked = asyncio.create_task(http.post("/v1/completions", json=BODY))
            if status == 200:
                await worker.seen(2)
            else:
                await asked
        assert (await asked).status_code == status


class TestQueueLimit:
    @pytest.fixture
    def gateway_config(self, gateway_config: GatewayConfig) -> GatewayConfig:
        return replace(gateway_config, max_queued_requests=1)

    async def test_a_refusal_says_when_to_come_back_and_how_long_it_takes_once_that_is_known(
        self, http: httpx.AsyncClient, worker: FakeWorker, running: RunningGateway
    ):
        async with one_before(http, worker):
            unknown = await http.post("/v1/completions", json=BODY)
            assert (unknown.status_code, unknown.headers["retry-after"]) == (429, "1")
            assert PREDICTED not in unknown.headers
        await learn(http)
        teach(running, ttft_s=0.25)
        async with one_before(http, worker):
            await asyncio.sleep(LEAST_TTFT_S)
            known = await http.post("/v1/completions", json=BODY)
            assert (known.status_code, known.headers["retry-after"]) == (429, "1")
            assert known.headers[PREDICTED] == "250"


async def test_nothing_is_refused_before_anything_is_known(http: httpx.AsyncClient, worker: FakeWorker):
    worker.script.may_step.clear()
    waiting = [asyncio.create_task(http.post("/v1/completions", json=BODY)) for _ in range(3)]
    await worker.seen(3)
    worker.script.may_step.set()
    assert [(await one).status_code for one in waiting] == [200] * 3
