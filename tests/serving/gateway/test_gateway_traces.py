"""Every request has one row, however it ends, whose phases add up to its time to the nanosecond."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import polars as pl
import pytest

from moonshard.rpc import link_pb2
from moonshard.rpc.client import AsyncClient
from moonshard.serving.affinity import session_key
from moonshard.serving.config import GatewayConfig, TraceConfig
from moonshard.serving.gateway.main import RunningGateway, serving
from moonshard.serving.gateway.stamps import Stamps
from moonshard.serving.tenants import hash_key
from moonshard.serving.trace.parts import read_table
from moonshard.serving.trace.schema import PHASES, REQUESTS, TOKENS
from tests.serving.gateway import fake_worker
from tests.serving.gateway.conftest import FIXTURE, make_config
from tests.serving.gateway.fake_worker import FakeWorker
from tests.serving.gateway.fleet import NUM_TOKENS, PROMPT, Form, ask, decode_worker, fleet, prefill_worker
from tests.serving.gateway.test_gateway_cancel import post_raw
from tests.serving.gateway.test_gateway_metrics import samples

ASKED = {"model": "kimi", "prompt": [1, 2, 3, 4], "max_tokens": 5}


@asynccontextmanager
async def recorded(
    worker: FakeWorker, folder: Path, **gateway: object
) -> AsyncIterator[tuple[RunningGateway, httpx.AsyncClient]]:
    """The recording is complete when the block has ended."""
    defaults = {"port": 0, "grpc_port": 0, "drain_timeout_s": 1}
    async with asyncio.timeout(60), fake_worker.serving(worker) as port:
        config = make_config(
            GatewayConfig(**(defaults | gateway)),  # pyright: ignore[reportArgumentType]
            FIXTURE,
            [f"127.0.0.1:{port}"],
        )
        async with (
            serving(replace(config, trace=TraceConfig(path=folder, tokens=True))) as running,
            httpx.AsyncClient(base_url=running.http, timeout=30, trust_env=False) as http,
        ):
            await running.gateway.pool.wait_ready()
            yield running, http


def requests_of(folder: Path) -> pl.DataFrame:
    """In the order in which they ended. Whatever became of them, their phases add up."""
    found = read_table(folder, REQUESTS)
    assert (found.select(pl.sum_horizontal(PHASES)).to_series() == found["e2e_ns"]).all()
    assert (found.select(pl.min_horizontal(PHASES)).to_series() >= 0).all()
    return found


def tokens_of(folder: Path, request_id: str, choice: int = 0) -> pl.DataFrame:
    return read_table(folder, TOKENS).filter(request_id=request_id, choice=choice)


@pytest.mark.parametrize("form", ["http stream", "http whole", "grpc"])
async def test_many_requests_through_two_workers_are_as_many_rows_that_add_up(tmp_path: Path, form: Form):
    prefill, decode = prefill_worker(), decode_worker()
    prefill.script.cached_tokens = 16
    async with fleet(prefill, decode, trace=TraceConfig(path=tmp_path, tokens=True)) as running:
        await asyncio.gather(*(ask(running, form, n=1 + number % 3) for number in range(30)))
    found = requests_of(tmp_path)
    assert found.height == 30
    assert found["outcome"].unique().to_list() == ["completed"]
    assert found["completion_tokens"].to_list() == [NUM_TOKENS * n for n in found["num_choices"]]
    assert found["prompt_tokens"].unique().to_list() == [len(PROMPT)]
    assert found["is_local_prefill"].to_list() == [False] * 30
    assert found["prefill_epoch"].unique().to_list() == [prefill.welcome.epoch.hex()]
    assert found["decode_epoch"].unique().to_list() == [decode.welcome.epoch.hex()]
    for name in ("handoff_gap_ms", "transfer_ms", "land_ms", "join_ms", "wire_ms", "worker_decode_ms"):
        assert found[name].null_count() == 0
    first_ms = found["first_token_ns"] / 1e6
    rest_ms = first_ms - found["worker_queue_ms"] - found["worker_prefill_ms"] - found["wire_ms"]
    assert (rest_ms.abs() < 1e-6).all()
    assert (found["handoff_gap_ms"] <= found["decode_ns"] / 1e6).all()
    end_ns = found["received_ns"] + found["e2e_ns"]
    assert ((found["received_ns"] < found["transferred_ns"]) & (found["transferred_ns"] < end_ns)).all()
    assert (found["ttft_ns"] >= found["gateway_queue_ns"] + found["first_token_ns"]).all()
    for row in found.iter_rows(named=True):
        for choice in range(row["num_choices"]):
            tokens = tokens_of(tmp_path, row["request_id"], choice)
            assert tokens["index"].to_list() == list(range(NUM_TOKENS))
            assert tokens["arrived_ns"].is_sorted()


async def test_a_row_says_what_its_client_was_told(worker: FakeWorker, tmp_path: Path):
    worker.script.cached_tokens = 2
    async with recorded(worker, tmp_path) as (running, _), AsyncClient(running.grpc) as client:
        told = await client.generate([1, 2, 3, 4], max_tokens=5, request_id="mine")
    (row,) = requests_of(tmp_path).iter_rows(named=True)
    timing = told.timing
    assert (row["request_id"], row["finish_reason"], row["model"]) == ("mine", "length", "kimi")
    assert (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]) == (4, 2, 5)
    assert row["e2e_ns"] == pytest.approx(timing.e2e_ms * 1e6, abs=1)
    for name in ("gateway_queue", "first_token", "decode", "finish"):
        assert row[f"{name}_ns"] == pytest.approx(getattr(timing, f"{name}_ms") * 1e6, abs=1)
    for name in ("worker_queue_ms", "worker_prefill_ms", "worker_decode_ms", "wire_ms"):
        assert row[name] == getattr(timing, name)
    assert row["is_local_prefill"] is True
    assert row["prefill_worker"] == row["decode_worker"] == running.gateway.pool.links[0].address
    assert row["attempt_id"] == worker.runs[0].request_id.hex()
    assert [row[name] for name in ("transfer_ms", "transferred_ns", "handoff_gap_ms", "error", "session")] == [None] * 5


async def test_what_failed_was_refused_or_left_is_a_row_with_its_error(worker: FakeWorker, tmp_path: Path):
    async with recorded(worker, tmp_path, max_queued_requests=1) as (running, http):
        for body in (ASKED | {"prompt": []}, ASKED | {"max_tokens": 10**6}, ASKED | {"temperature": 7}):
            assert (await http.post("/v1/completions", json=body)).status_code == 400
        assert (await http.post("/v1/completions", json=ASKED | {"model": "other"})).status_code == 404
        assert (await http.post("/v1/completions", json=ASKED)).status_code == 200
        worker.script.failure = link_pb2.Failed(code=8, message="full")
        assert (await http.post("/v1/completions", json=ASKED)).status_code == 429
        worker.script.failure, worker.script.fail_after_tokens = None, 2
        assert (await http.post("/v1/completions", json=ASKED)).status_code == 500
        worker.script.fail_after_tokens, worker.script.max_tokens_sent = None, 3
        reader, writer = await post_raw(running, ASKED | {"stream": True})
        for _ in range(3):
            await reader.readuntil(b"data: ")
        writer.close()
        await running.gateway.wait_idle()
        worker.script.may_step.clear()
        _, writer = await post_raw(running, ASKED)
        await worker.seen(5)
        assert (await http.post("/v1/completions", json=ASKED)).status_code == 429
        writer.close()
        await running.gateway.wait_idle()
        counted = {key[1]: num for key, num in (await samples(http)).items() if key[0] == "moonshard_requests_total"}
    found = requests_of(tmp_path)
    assert found["outcome"].to_list() == [
        *("invalid_argument", "invalid_argument", "invalid_argument", "not_found", "completed"),
        *("resource_exhausted", "internal", "cancelled", "resource_exhausted", "cancelled"),
    ]
    assert {row["outcome"]: row["count"] for row in found["outcome"].value_counts().iter_rows(named=True)} == counted
    assert "temperature" in found["error"][2]
    assert found["error"][5] == "full"
    assert found["error"].is_null().to_list() == [o in ("completed", "cancelled") for o in found["outcome"]]
    # Never tokenised, or never sent, or sent without a token: what is not known is null, and no time is lost.
    assert found["attempt_id"].is_null().to_list() == [*[True] * 4, *[False] * 4, True, False]
    assert found["completion_tokens"].to_list() == [0, 0, 0, 0, 5, 0, 2, 3, 0, 0]
    is_sent, has_tokens = found["attempt_id"].is_not_null(), found["completion_tokens"] > 0
    assert (found["gateway_queue_ns"] == found["e2e_ns"]).to_list() == (~is_sent).to_list()
    assert (found["decode_ns"] > 0).to_list() == has_tokens.to_list()
    assert found["cached_tokens"].is_null().to_list() == (~has_tokens).to_list()
    assert (found["finish_ns"] > 0).to_list() == [o == "completed" for o in found["outcome"]]


async def test_a_request_that_goes_on_elsewhere_is_one_row_of_where_it_ended(worker: FakeWorker, tmp_path: Path):
    worker.script.points.hold("step 2")
    async with recorded(worker, tmp_path) as (_, http):
        asking = asyncio.create_task(http.post("/v1/completions", json=ASKED))
        await worker.script.points.reached("step 2")
        worker.drop_link()
        worker.script.points.release()
        assert (await asking).status_code == 200
    (row,) = requests_of(tmp_path).iter_rows(named=True)
    assert (row["num_retries"], row["outcome"], row["completion_tokens"]) == (1, "completed", 5)
    assert row["attempt_id"] == worker.runs[1].request_id.hex()
    assert tokens_of(tmp_path, row["request_id"])["index"].to_list() == list(range(5))


async def test_tenants_and_sessions_are_told_apart_but_not_named(worker: FakeWorker, tmp_path: Path):
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[keys]\n{hash_key("one")} = "team-a"\n{hash_key("two")} = "team-b"\n')
    async with recorded(worker, tmp_path, keys=keys) as (_, http):
        for key in ("one", "two", "one"):
            headers = {"authorization": f"Bearer {key}", "x-session-affinity": "its name"}
            await http.post("/v1/completions", json=ASKED, headers=headers)
        assert (await http.post("/v1/completions", json=ASKED)).status_code == 401
    found = requests_of(tmp_path)
    assert found["tenant"][0] == found["tenant"][2] != found["tenant"][1]
    assert found["session"].to_list() == [session_key(f"team-{t}", "its name").hex() for t in "aba"]
    assert not [v for row in found.iter_rows() for v in row if isinstance(v, str) and "team-" in v]


async def test_without_a_path_nothing_is_written_and_nothing_counted(running: RunningGateway, http: httpx.AsyncClient):
    await http.post("/v1/completions", json=ASKED)
    assert not [key for key in await samples(http) if key[0].startswith("moonshard_trace")]


async def test_where_nothing_can_be_written_everybody_is_served(worker: FakeWorker, tmp_path: Path):
    (tmp_path / "a file").touch()
    async with recorded(worker, tmp_path / "a file") as (_, http):
        assert (await http.post("/v1/completions", json=ASKED)).status_code == 200
        assert (await samples(http))["moonshard_trace_lost_rows_total",] == 0  # not yet
    assert (tmp_path / "a file").read_bytes() == b""


def test_a_request_ends_once_whoever_asks_when():
    stamps = Stamps(received_ns=1, sent_ns=2, first_arrival_ns=4, last_arrival_ns=8)
    phases_ns = stamps.phases_ns(is_complete=True)
    assert phases_ns[:3] == (1, 2, 4)
    assert stamps.phases_ns(is_complete=True) == phases_ns
    assert stamps.timing().e2e_ms == sum(phase_ns / 1e6 for phase_ns in phases_ns)
