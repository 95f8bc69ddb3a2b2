"""A tenant gets its tokens and no more, others are not touched, and a refusal says when to come back."""

import asyncio
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonshard.rpc import link_pb2
from moonshard.rpc.client import AsyncClient
from moonshard.rpc.status import Overloaded
from moonshard.serving.config.keys import GatewayConfig
from moonshard.serving.config.tenants import Tenant, hash_key
from moonshard.serving.control.ttft.bound import TooLate
from moonshard.serving.gateway.records.accounts.accounts import PromptHold
from moonshard.serving.gateway.records.accounts.rates import TokenRates
from tests.serving.gateway.fake_worker import FakeWorker
from tests.serving.gateway.records.test_gateway_metrics import samples
from tests.serving.gateway.workers.fleet import front_of

LONG_S = 3600 * 24 * 365 * 50  # a window that does not end during a test


def let_in(rates: TokenRates, tenant: str, num_prompt: int) -> None:
    rates.admit(tenant, num_prompt)
    rates.used(tenant, num_prompt)


@settings(deadline=None)
@given(
    limit=st.integers(1, 1000),
    asked=st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 300), st.integers(0, 300)), max_size=40),
)
def test_within_a_window_no_tenant_is_let_in_beyond_its_tokens(limit: int, asked: list[tuple[str, int, int]]):
    rates = TokenRates(limit, LONG_S)
    prompts, completions = dict.fromkeys("ab", 0), dict.fromkeys("ab", 0)
    for tenant, num_prompt, num_completion in asked:
        fits = prompts[tenant] + completions[tenant] + num_prompt <= limit
        if not fits:
            with pytest.raises(Overloaded):
                rates.admit(tenant, num_prompt)
            continue
        let_in(rates, tenant, num_prompt)  # a refusal before it used up nothing
        prompts[tenant] += num_prompt
        completions[tenant] += num_completion
        rates.used(tenant, num_completion)


@settings(deadline=None)
@given(
    limit=st.integers(1, 1000),
    asked=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 3), st.booleans()), max_size=40),
)
def test_what_is_on_its_way_counts_until_it_is_refused_and_for_good_once_it_is_computed(
    limit: int, asked: list[tuple[int, int, bool]]
):
    rates, computed, coming = TokenRates(limit, LONG_S), 0, list[int]()
    for num_prompt, num_ended, is_computed in asked:
        for ended in coming[:num_ended]:
            rates.release("a", ended)
            if is_computed:
                rates.used("a", ended)
                computed += ended
        del coming[:num_ended]
        if computed + sum(coming) + num_prompt <= limit:
            rates.admit("a", num_prompt)
            rates.hold("a", num_prompt)
            coming.append(num_prompt)
        else:
            with pytest.raises(Overloaded):
                rates.admit("a", num_prompt)


class Clock:
    """A clock that a test moves; it begins in the middle of a window."""

    def __init__(self) -> None:
        self.now_s = 1000.5

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("num_completion", [0, 30])
def test_after_the_delay_that_it_was_told_it_is_let_in_and_not_before(num_completion: int):
    rates = TokenRates(100, 1, clock_s=(clock := Clock()))
    let_in(rates, "a", 90)
    rates.used("a", num_completion)
    with pytest.raises(Overloaded) as refused:
        rates.admit("a", 50)
    assert refused.value.retry_after_s is not None
    assert 0 < refused.value.retry_after_s <= 2
    let_in(rates, "b", 50)
    clock.now_s += refused.value.retry_after_s - 0.02
    with pytest.raises(Overloaded):
        rates.admit("a", 50)
    clock.now_s += 0.03
    let_in(rates, "a", 50)


def test_a_completion_beyond_the_rate_is_paid_for_before_the_next_prompt():
    rates = TokenRates(100, 1, clock_s=(clock := Clock()))
    let_in(rates, "a", 90)
    rates.used("a", 150)  # 140 tokens more than the window has room for
    while True:
        try:
            rates.admit("a", 50)
        except Overloaded as refused:
            clock.now_s += (refused.retry_after_s or 0) + 0.01
        else:
            break
    assert 1.7 < clock.now_s - 1000.5 < 3.5  # 190 tokens at 100 a second


@pytest.mark.parametrize("jump_s", [-86_400.0 * 365, -7200.0, -61.0, 61.0, 7200.0, 86_400.0 * 365])
def test_setting_the_machines_clock_lets_nobody_through_and_locks_nobody_out(
    jump_s: float, monkeypatch: pytest.MonkeyPatch
):
    begun_s, real_s = time.monotonic(), time.time()
    rates = TokenRates(100)
    let_in(rates, "a", 90)
    monkeypatch.setattr(time, "time", lambda: real_s + jump_s)
    with pytest.raises(Overloaded) as refused:
        rates.admit("a", 50)
    assert time.monotonic() - begun_s < 30  # else some may have left the window
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s <= 120


def test_a_prompt_beyond_the_whole_rate_is_not_told_to_come_back():
    with pytest.raises(Overloaded) as refused:
        TokenRates(100).admit("a", 101)
    assert refused.value.retry_after_s is None


@pytest.fixture
def config(tmp_path: Path) -> GatewayConfig:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[keys]\n{hash_key("one")} = "a"\n{hash_key("two")} = "b"\n')
    return GatewayConfig(port=0, grpc_port=0, drain_timeout_s=1, keys=keys, tenant_tokens_per_minute=30)


async def test_a_tenant_over_its_rate_is_refused_on_both_fronts_and_another_served(
    worker: FakeWorker, config: GatewayConfig
):
    one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    body = {"model": "kimi", "prompt": [1] * 10, "max_tokens": 15}
    async with front_of(worker, config) as (running, http):
        assert (await http.post("/v1/completions", json=body, headers=one)).status_code == 200
        refused = await http.post("/v1/completions", json=body, headers=one)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == refused.json()["error"]["type"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 120
        too_long = await http.post("/v1/completions", json=body | {"prompt": [1] * 31}, headers=two)
        assert (too_long.status_code, "retry-after" in too_long.headers) == (429, False)
        assert (await http.post("/v1/completions", json=body, headers=two)).status_code == 200
        async with AsyncClient(running.grpc) as client:
            with pytest.raises(Overloaded) as overloaded:
                await client.generate([1] * 10, max_tokens=15, metadata=[("authorization", "Bearer one")])
            assert overloaded.value.retry_after_s is not None
        found = await samples(http)
        assert found["vllm:admission_rejections_total", "kimi", "tenant_tokens_per_minute"] == 3
    assert len(worker.runs) == 2


async def test_a_prompt_that_no_worker_was_sent_uses_up_nothing(worker: FakeWorker, config: GatewayConfig):
    one = {"authorization": "Bearer one"}
    body = {"model": "kimi", "prompt": [1] * 10, "max_tokens": 1}
    async with front_of(worker, config) as (running, http):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(running.gateway.pool.knowledge.dispatcher, "begin", refuse)
            for _ in range(5):
                assert (await http.post("/v1/completions", json=body, headers=one)).status_code == 429
        assert not worker.runs
        for _ in range(2):
            assert (await http.post("/v1/completions", json=body, headers=one)).status_code == 200
        assert (await http.post("/v1/completions", json=body, headers=one)).status_code == 429


FULL = link_pb2.Failed(code=8, message="no room", retry_after_s=1.0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_its_worker_refused_uses_up_nothing(
    worker: FakeWorker, config: GatewayConfig, stream: bool
):
    one = {"authorization": "Bearer one"}
    body = {"model": "kimi", "prompt": [1] * 10, "max_tokens": 1, "stream": stream}
    async with front_of(worker, config) as (_, http):
        worker.script.failure = FULL
        for _ in range(5):
            refused = await http.post("/v1/completions", json=body, headers=one)
            assert (refused.status_code, "no room" in refused.text) == (429, True)
        assert len(worker.runs) == 5
        worker.script.failure = None
        for _ in range(2):
            assert (await http.post("/v1/completions", json=body, headers=one)).status_code == 200
        assert (await http.post("/v1/completions", json=body, headers=one)).status_code == 429
    assert len(worker.runs) == 7


async def test_prompts_on_their_way_count_and_so_do_those_whose_clients_left(worker: FakeWorker, config: GatewayConfig):
    one = {"authorization": "Bearer one"}
    body = {"model": "kimi", "prompt": [1] * 15, "max_tokens": 1}
    async with front_of(worker, config) as (running, http):
        worker.script.may_step.clear()
        leaving = [asyncio.create_task(http.post("/v1/completions", json=body, headers=one)) for _ in range(2)]
        await worker.seen(2)
        assert (await http.post("/v1/completions", json=body, headers=one)).status_code == 429
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        await running.gateway.wait_idle()
        assert (await http.post("/v1/completions", json=body, headers=one)).status_code == 429
    assert len(worker.runs) == 2


def refuse(*_: object, **__: object) -> TooLate:
    return TooLate(predicted_s=9.0, limit_s=1.0, retry_after_s=1.0)


def test_whatever_a_worker_says_a_prompt_is_given_back_once():
    rates = TokenRates(100, LONG_S)
    refused = PromptHold(rates, Tenant("a"), 60)
    refused.close(is_refused=True)
    refused.computed()
    refused.close(is_refused=False)
    PromptHold(rates, Tenant("a"), 60)
    rates.admit("a", 40)
    with pytest.raises(Overloaded):
        rates.admit("a", 41)
