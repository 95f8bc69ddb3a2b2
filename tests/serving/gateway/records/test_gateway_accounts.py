"""What clients are told that they used, what Prometheus counts and what the ledger says are the same."""

import asyncio
import json
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import httpx
import pytest

from moonshard.rpc import link_pb2
from moonshard.rpc.client import AsyncClient, Client
from moonshard.rpc.status import Unauthenticated
from moonshard.serving.cli import main
from moonshard.serving.config.keys import ConfigError, GatewayConfig
from moonshard.serving.config.reading import load_config
from moonshard.serving.config.tenants import hash_key
from moonshard.serving.control.routing.pins import affinity_key
from moonshard.serving.gateway.process import RunningGateway, serving
from moonshard.serving.gateway.records.accounts.ledger import LedgerError, LedgerRow, read_ledger
from tests.serving.gateway import fake_worker
from tests.serving.gateway.conftest import FIXTURE
from tests.serving.gateway.fake_worker import FakeWorker
from tests.serving.gateway.pipeline.test_gateway_cancel import post_raw
from tests.serving.gateway.records.test_gateway_metrics import samples
from tests.serving.gateway.sse import events_of
from tests.serving.gateway.workers.fleet import (
    HANG_S,
    NUM_TOKENS,
    PROMPT,
    decode_worker,
    first_to_reach,
    fleet,
    front_of,
    prefill_worker,
)

ASKED = {"model": "kimi", "prompt": [1, 2, 3, 4], "max_tokens": 5}
STREAMED = ASKED | {"stream": True, "stream_options": {"include_usage": True}}
type Tokens = tuple[int, int, int]  # of prompts, of these cached, of completions


def gateway(
    worker: FakeWorker, ledger: Path, keys: Path | None = None
) -> AbstractAsyncContextManager[tuple[RunningGateway, httpx.AsyncClient]]:
    """The ledger is complete when the block has ended."""
    config = GatewayConfig(port=0, grpc_port=0, drain_timeout_s=1, ledger=ledger, keys=keys, max_queued_requests=1)
    return front_of(worker, config)


def told(usage: dict) -> Tokens:
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]


def total(usages: Iterable[Tokens]) -> Tokens:
    prompt, cached, completion = (sum(column) for column in zip(*usages, strict=True))
    return prompt, cached, completion


async def counted(http: httpx.AsyncClient) -> Tokens:
    """Of all workers."""
    found = await samples(http)

    def counter(name: str, *labels: str) -> int:
        return int(sum(value for (of, *by), value in found.items() if of == name and {*labels} <= {*by}))

    sources = "vllm:prompt_tokens_by_source_total"
    on_device, prompt = counter("vllm:prefix_cache_hits_total"), counter("vllm:prompt_tokens_total")
    assert (counter(sources, "local_cache_hit"), counter(sources)) == (on_device, prompt)
    cached = on_device + counter("vllm:external_prefix_cache_hits_total")
    assert counter("moonshard_cached_tokens_total") == cached
    return prompt, cached, counter("vllm:generation_tokens_total")


def written(rows: Iterable[LedgerRow]) -> Tokens:
    return total((row.prompt_tokens, row.cached_tokens, row.completion_tokens) for row in rows)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


async def test_answers_metrics_and_ledger_add_up_to_the_same(worker: FakeWorker, ledger: Path):
    usages: list[Tokens] = []
    async with gateway(worker, ledger) as (running, http), AsyncClient(running.grpc) as client:
        for worker.script.cached_tokens in (0, 2, 3, 4, 1000):
            usages.append(told((await http.post("/v1/completions", json=ASKED | {"n": 2})).json()["usage"]))
            usages.append(told(events_of((await http.post("/v1/completions", json=STREAMED)).text)[-1]["usage"]))
            usage = (await client.generate(ASKED["prompt"], max_tokens=3)).usage
            usages.append((usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens))
        assert await counted(http) == total(usages)
    rows = list(read_ledger(ledger))
    assert [(row.prompt_tokens, row.cached_tokens, row.completion_tokens) for row in rows] == usages
    assert [cached for _, cached, _ in usages[::3]] == [0, 2, 3, 3, 3]  # the last token is always computed
    assert {row.outcome for row in rows} == {"length"}
    assert sum(row.usd for row in rows) == pytest.approx(
        sum((prompt - cached) * 0.6 + cached * 0.1 + completion * 3 for prompt, cached, completion in usages) / 1e6
    )


async def test_answers_metrics_and_ledger_say_the_same_of_what_slower_tiers_gave(worker: FakeWorker, ledger: Path):
    worker.load.kv_store.SetInParent()
    said = (({"host": 2}, 3), ({"host": 1, "ssd": 1}, 2), ({"ssd": 4}, 4), ({}, 1), ({"store": 1}, 0))
    told_of = list[dict[str, int]]()
    async with gateway(worker, ledger) as (running, http), AsyncClient(running.grpc) as client:
        for worker.script.cached_by_tier, worker.script.cached_tokens in said:
            usage = (await http.post("/v1/completions", json=ASKED)).json()["usage"]["prompt_tokens_details"]
            streamed = events_of((await http.post("/v1/completions", json=STREAMED)).text)[-1]["usage"]
            assert streamed["prompt_tokens_details"] == usage
            by_tier = usage.get("cached_tokens_details", {"device": usage["cached_tokens"]})
            assert sum(by_tier.values()) == usage["cached_tokens"]
            told_of.append(by_tier)
            of_grpc = (await client.generate(ASKED["prompt"], max_tokens=3)).usage
            on_device = of_grpc.cached_tokens - sum(of_grpc.cached_by_tier.values())
            assert {"device": on_device, **of_grpc.cached_by_tier} == by_tier
        found = await samples(http)
        _, cached, _ = await counted(http)
    assert told_of == [
        *({"device": 1, "host": 2}, {"device": 0, "host": 1, "ssd": 1}),
        *({"device": 0, "ssd": 3}, {"device": 1}, {"device": 0}),
    ]
    summed = {tier: 3 * sum(each.get(tier, 0) for each in told_of) for tier in ("device", "host", "ssd")}
    assert {tier: found["moonshard_cached_tokens_total", "0", "kimi", tier] for tier in summed} == summed
    external = [found[f"vllm:external_prefix_cache_{name}_total", "0", "kimi"] for name in ("queries", "hits")]
    assert external == [3 * 5 * 4 - summed["device"], summed["host"] + summed["ssd"]]
    rows = list(read_ledger(ledger))
    of_rows = [{"device": row.cached_tokens - sum(row.cached_by_tier.values()), **row.cached_by_tier} for row in rows]
    assert of_rows == [each for each in told_of for _ in range(3)]
    assert sum(row.cached_tokens for row in rows) == cached


async def test_rows_cost_what_the_price_table_of_the_file_says(worker: FakeWorker, tmp_path: Path, ledger: Path):
    file, out = tmp_path / "deployment.toml", tmp_path / "out.json"
    async with fake_worker.serving(worker) as port:
        file.write_text(
            f'[model]\npath = "{FIXTURE}"\n'
            f'[gateway]\nport = 0\ngrpc_port = 0\nworkers = ["127.0.0.1:{port}"]\nledger = "{ledger}"\n'
            "[prices]\ninput = 1_000.0\ncached_input = 100.0\noutput = 100_000.0\n"
        )
        async with (
            serving(load_config(file)) as running,
            httpx.AsyncClient(base_url=running.http, timeout=HANG_S, trust_env=False) as http,
        ):
            await running.gateway.pool.wait_ready()
            worker.script.cached_tokens = 3
            body = {"prompt": [1, 2, 3, 4], "max_tokens": 5}
            assert told((await http.post("/v1/completions", json=body)).json()["usage"]) == (4, 3, 5)
    assert await asyncio.to_thread(main, ["ledger", str(ledger), "--json", str(out)]) == 0
    (summed,) = json.loads(out.read_text())
    assert summed["usd"] == pytest.approx(0.001 + 3 * 0.0001 + 5 * 0.1)


async def test_a_client_that_leaves_has_used_what_it_was_sent(worker: FakeWorker, ledger: Path):
    async with gateway(worker, ledger) as (running, http):
        worker.script.cached_tokens, worker.script.max_tokens_sent = 1, 3
        reader, writer = await post_raw(running, ASKED | {"stream": True})
        for _ in range(3):
            await reader.readuntil(b"data: ")
        writer.close()
        await running.gateway.wait_idle()
        worker.script.may_step.clear()
        _, writer = await post_raw(running, ASKED)
        await worker.seen(2)
        writer.close()
        await running.gateway.wait_idle()
        used = await counted(http)
    rows = list(read_ledger(ledger))
    assert [row.outcome for row in rows] == ["cancelled", "cancelled"]
    assert (written(rows), written(rows[:1])) == (used, used)  # nothing came of the second
    assert used == (4, 1, 3)


async def test_a_request_that_fails_has_a_row_with_what_came_before(worker: FakeWorker, ledger: Path):
    worker.script.fail_after_tokens = 2
    async with gateway(worker, ledger) as (_, http):
        assert (await http.post("/v1/completions", json=ASKED)).status_code == 500
        used = await counted(http)
    (row,) = read_ledger(ledger)
    assert (row.outcome, row.completion_tokens) == ("internal", 2)
    assert written([row]) == used


async def test_a_request_that_goes_on_elsewhere_is_counted_once(worker: FakeWorker, ledger: Path):
    worker.script.points.hold("step 2")
    async with gateway(worker, ledger) as (_, http):
        asking = asyncio.create_task(http.post("/v1/completions", json=ASKED))
        await worker.script.points.reached("step 2")
        worker.script.cached_tokens = 3  # what it finds when it comes back, of what it computed itself
        worker.drop_link()
        worker.script.points.release()
        answer = (await asking).json()
        used = await counted(http)
    (row,) = read_ledger(ledger)
    assert told(answer["usage"]) == written([row]) == used == (4, 0, 5)
    assert len(worker.runs) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("dies", "at", "local", "cached"),
    [
        ("", "", False, 16),
        ("", "", True, 32),
        ("prefill", "chunk 0", False, 16),
        ("decode", "start", False, 16),
        ("decode", "step 3", False, 16),
        ("decode", "step 0", True, 32),
    ],
)
async def test_the_three_are_the_same_wherever_a_prompt_is_prefilled_and_whoever_is_lost(
    ledger: Path, dies: str, at: str, local: bool, cached: int, stream: bool
):
    workers = [prefill_worker(1), prefill_worker(2), decode_worker(1), decode_worker(2)]
    for worker in workers:
        worker.script.cached_tokens = 16 if worker.welcome.role == "prefill" else 32
        if worker.welcome.role == "prefill":
            worker.load.kv_store.SetInParent()  # it has tiers, and they have nothing of this
    mortal = [worker for worker in workers if worker.welcome.role == dies]
    for worker in mortal:
        worker.script.points.hold(at)
    asked = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "n": 2, "stream": stream}
    if stream:
        asked["stream_options"] = {"include_usage": True}
    async with (
        fleet(*workers, ledger=ledger, local_prefill_max_tokens=1000 if local else 0) as running,
        httpx.AsyncClient(base_url=running.http, timeout=HANG_S, trust_env=False) as http,
    ):
        async with asyncio.timeout(HANG_S):
            while [key[0] for key in await samples(http)].count("moonshard_tier_late_fetches_total") < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # until both have told that they have tiers
        asking = asyncio.create_task(http.post("/v1/completions", json=asked))
        if mortal:
            (await first_to_reach(at, mortal)).die()
        answer = await asking
        used = await counted(http)
        found = await samples(http)
    asked_of_tiers = [found[key] for key in found if key[0] == "vllm:external_prefix_cache_queries_total"]
    assert asked_of_tiers == ([] if local else [len(PROMPT) - cached])
    usage = told(events_of(answer.text)[-1]["usage"] if stream else answer.json()["usage"])
    (row,) = read_ledger(ledger)
    assert usage == used == written([row]) == (len(PROMPT), cached, 2 * NUM_TOKENS)
    assert row.outcome == "length"


@pytest.mark.parametrize("front", ["http", "grpc"])
async def test_what_a_closing_gateway_cuts_off_has_a_row_too(worker: FakeWorker, ledger: Path, front: str):
    worker.script.max_tokens_sent = 2
    async with gateway(worker, ledger) as (running, http), AsyncClient(running.grpc) as client:
        if front == "http":
            asking = asyncio.create_task(http.post("/v1/completions", json=ASKED))
        else:
            asking = asyncio.create_task(client.generate(ASKED["prompt"], max_tokens=5))
        while (await counted(http))[-1] < 2:  # sent is not received: the gateway must have them before it closes
            await running.gateway.pool.wait_changed(0.01)
    await asyncio.gather(asking, return_exceptions=True)
    (row,) = read_ledger(ledger)
    assert row.completion_tokens == 2


async def test_what_was_refused_used_nothing_and_has_no_row(worker: FakeWorker, ledger: Path):
    async with gateway(worker, ledger) as (_, http):
        for body, status in ((ASKED | {"prompt": []}, 400), (ASKED | {"max_tokens": 10**6}, 400)):
            assert (await http.post("/v1/completions", json=body)).status_code == status
        worker.script.may_step.clear()
        held = asyncio.create_task(http.post("/v1/completions", json=ASKED))
        await worker.seen(1)
        assert (await http.post("/v1/completions", json=ASKED)).status_code == 429
        worker.script.may_step.set()
        await held
    assert len(list(read_ledger(ledger))) == 1


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(f'[keys]\n{hash_key("one")} = "a"\n{hash_key("two")} = "b"\n')
    return path


async def test_rows_name_tenant_and_session(worker: FakeWorker, ledger: Path, keys: Path):
    async with gateway(worker, ledger, keys) as (_, http):
        for key in ("one", "two"):
            headers = {"authorization": f"Bearer {key}", "x-session-affinity": "its name"}
            await http.post("/v1/completions", json=ASKED, headers=headers)
        await http.post("/v1/completions", json=ASKED, headers={"authorization": "Bearer three"})
    rows = list(read_ledger(ledger))
    assert [row.tenant for row in rows] == ["a", "b"]
    assert [row.session for row in rows] == [affinity_key(tenant, "its name").hex() for tenant in ("a", "b")]


async def test_grpcs_clients_say_their_key_with_every_call(worker: FakeWorker, ledger: Path, keys: Path):
    async with gateway(worker, ledger, keys) as (running, _):
        async with AsyncClient(running.grpc, api_key="two") as client:
            assert await client.tokenize("a b")
            await client.generate(PROMPT, max_tokens=1, metadata=(("x-session-affinity", "its name"),))
        async with AsyncClient(running.grpc) as stranger:
            with pytest.raises(Unauthenticated):
                await stranger.tokenize("a b")
    (row,) = read_ledger(ledger)
    assert (row.tenant, row.session) == ("b", affinity_key("b", "its name").hex())


def test_a_key_that_no_metadata_can_carry_is_refused_without_being_told():
    with pytest.raises(ValueError, match=r"^api_key: expected printable ASCII$"):
        Client(api_key="line\nbreak")


async def test_on_a_full_disk_everybody_is_served_and_an_alert_counter_rises(worker: FakeWorker):
    async with gateway(worker, Path("/dev/full")) as (_, http):
        usages = []
        for _ in range(3):
            answer = await http.post("/v1/completions", json=ASKED)
            assert answer.status_code == 200
            usages.append(told(answer.json()["usage"]))
        assert await counted(http) == total(usages)
        while (found := await samples(http))["moonshard_ledger_failures_total",] < 3:
            assert found["moonshard_ledger_pending_rows",] <= 3
        assert found["moonshard_ledger_pending_rows",] == 3
        assert found["moonshard_ledger_lost_rows_total",] == 0


async def test_a_ledger_that_cannot_be_opened_stops_the_start(worker: FakeWorker, ledger: Path):
    with pytest.raises(ConfigError, match=r"gateway\.ledger: .*nowhere"):
        async with gateway(worker, ledger / "nowhere"):
            pass


async def test_two_gateways_do_not_share_a_ledger(worker: FakeWorker, ledger: Path):
    async with gateway(worker, ledger):
        with pytest.raises(LedgerError, match="another process writes to it"):
            async with gateway(FakeWorker(epoch=b"f" * 16), ledger):
                pass


async def test_what_a_failed_worker_said_is_not_lost(worker: FakeWorker, ledger: Path):
    worker.script.failure = link_pb2.Failed(code=8, message="full", retry_after_s=2.5)
    async with gateway(worker, ledger) as (_, http):
        assert (await http.post("/v1/completions", json=ASKED)).status_code == 429
    (row,) = read_ledger(ledger)
    assert (row.outcome, written([row]), row.usd) == ("resource_exhausted", (0, 0, 0), 0)
