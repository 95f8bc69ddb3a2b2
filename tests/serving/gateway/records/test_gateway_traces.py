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
from moonshard.rpc.status import InvalidArgument
from moonshard.serving.config.keys import ConfigError, GatewayConfig, TraceConfig
from moonshard.serving.config.tenants import hash_key
from moonshard.serving.control.routing.pins import affinity_key
from moonshard.serving.gateway.process import RunningGateway, serving
from moonshard.serving.observe.rows.parts import read_table
from moonshard.serving.observe.rows.schema import PHASES, REQUESTS, TOKENS
from tests.serving.gateway import fake_worker
from tests.serving.gateway.conftest import FIXTURE, make_config
from tests.serving.gateway.fake_worker import FakeWorker
from tests.serving.gateway.pipeline.test_gateway_cancel import post_raw
from tests.serving.gateway.records.test_gateway_metrics import samples
from tests.serving.gateway.workers.fleet import NUM_TOKENS, PROMPT, Form, ask, decode_worker, fleet, prefill_worker

ASKED = {"model": "kimi", "prompt": [1, 2, 3, 4], "max_tokens": 5}


@asynccontextmanager
async def recorded(
    worker: FakeWorker, folder: Path, *, max_rows: int = 8192, **gateway: object
) -> AsyncIterator[tuple[RunningGateway, httpx.AsyncClient]]:
    """The recording is complete when the block has ended."""
    defaults = {"port": 0, "grpc_port": 0, "drain_timeout_s": 1}
    async with asyncio.timeout(60), fake_worker.serving(worker) as port:
        config = make_config(
            GatewayConfig(**(defaults | gateway)),  # pyright: ignore[reportArgumentType]
            FIXTURE,
            [f"127.0.0.1:{port}"],
        )
        trace = TraceConfig(path=folder, tokens=True, max_rows=max_rows)
        async with (
            serving(replace(config, trace=trace)) as running,
            httpx.AsyncClient(base_url=running.http, timeout=30, trust_env=False) as http,
        ):
            await running.gateway.pool.wait_ready()
            yield running, http


def requests_of(folder: Path) -> pl.DataFrame:
    """In the order in which they ended. Whatever became of them, their phases add up to the time that was measured."""
    found = read_table(folder, REQUESTS)
    assert (found.select(pl.sum_horizontal(PHASES)).to_series() == found["e2e_ns"]).all()
    assert (found.select(pl.min_horizontal(PHASES)).to_series() >= 0).all()
    assert (found["lost_ns"].drop_nulls() <= found.filter(pl.col("lost_ns").is_not_null())["first_token_ns"]).all()
    begun = found.filter(pl.col("wire_ms").is_not_null())
    named_ms = begun["lost_ns"] / 1e6 + begun["decode_queue_ms"].fill_null(0.0)
    named_ms += begun["worker_queue_ms"] + begun["worker_prefill_ms"] + begun["wire_ms"]
    assert ((named_ms - begun["first_token_ns"] / 1e6).abs() < 1e-6).all()
    assert (begun["wire_ms"] >= -1).all()
    return found


def tokens_of(folder: Path, request_id: str, choice: int = 0) -> pl.DataFrame:
    return read_table(folder, TOKENS).filter(request_id=request_id, choice=choice)


@pytest.mark.parametrize("form", ["http stream", "http whole", "grpc"])
async def test_many_requests_through_two_workers_are_as_many_rows_that_add_up(tmp_path: Path, form: Form):
    prefill, decode = prefill_worker(), decode_worker()
    prefill.script.cached_tokens = 16
    decode.script.reserve_queue_ms = 0.005
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
    named_ms = found["lost_ns"] / 1e6 + found["decode_queue_ms"] + found["worker_queue_ms"] + found["worker_prefill_ms"]
    assert ((found["first_token_ns"] / 1e6 - named_ms - found["wire_ms"]).abs() < 1e-6).all()
    assert found["lost_ns"].to_list() == [0] * 30
    assert found["decode_queue_ms"].to_list() == [0.005] * 30
    assert (found["handoff_gap_ms"] <= found["decode_ns"] / 1e6).all()
    end_ns = found["received_ns"] + found["e2e_ns"]
    assert ((found["received_ns"] < found["transferred_ns"]) & (found["transferred_ns"] < end_ns)).all()
    assert (found["ttft_ns"] >= found["gateway_queue_ns"] + found["first_token_ns"]).all()
    for row in found.iter_rows(named=True):
        for choice in range(row["num_choices"]):
            tokens = tokens_of(tmp_path, row["request_id"], choice)
            assert tokens["index"].to_list() == list(range(NUM_TOKENS))
            assert tokens["arrived_ns"].is_sorted()


@pytest.mark.parametrize("are_first_tokens_late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("point", ["target", "chunk 0", "first_tokens", "last_chunk", "start"])
async def test_wherever_a_request_loses_a_handoff_its_time_adds_up_and_only_its_own_transfer_is_told(
    tmp_path: Path, point: str, are_first_tokens_late: bool
):
    prefill, decode = prefill_worker(), decode_worker()
    prefill.script.are_first_tokens_late = are_first_tokens_late
    failing = decode if point in ("target", "start") else prefill
    failing.script.points.failures[point] = link_pb2.Failed(cause=link_pb2.HANDOFF_CAUSE_CORRUPT)
    async with fleet(prefill, decode, trace=TraceConfig(path=tmp_path)) as running:
        await ask(running, "grpc")
    (row,) = requests_of(tmp_path).iter_rows(named=True)
    assert (row["outcome"], row["completion_tokens"]) == ("completed", 2 * NUM_TOKENS)
    assert row["is_local_prefill"] is True  # its last attempt, which went on where it decodes or began there
    has_first_tokens = point == "start" or (point == "last_chunk" and not are_first_tokens_late)
    assert row["num_retries"] == (1 if has_first_tokens else 2)
    assert (row["lost_ns"] == 0) == has_first_tokens
    assert (row["decode_queue_ms"] is None) == (not has_first_tokens)
    assert (row["transfer_ms"] is None) == (row["transferred_ns"] is None) == (point != "start")
    assert (row["land_ms"], row["join_ms"]) == (None, None)  # nobody decoded with what moved


@pytest.mark.parametrize(
    ("point", "num_tokens"), [("target", 0), ("chunk 0", 0), ("last_chunk", 1), ("start", 1), ("step 1", 2)]
)
async def test_whenever_a_client_leaves_a_handoff_its_time_adds_up(tmp_path: Path, point: str, num_tokens: int):
    prefill, decode = prefill_worker(), decode_worker()
    holding = prefill if "chunk" in point else decode
    holding.script.points.hold(point)
    seen: asyncio.Queue[object] = asyncio.Queue()

    async def read(client: AsyncClient) -> None:
        async with client.stream(PROMPT, max_tokens=NUM_TOKENS) as stream:
            async for delta in stream:
                seen.put_nowait(delta)

    async with (
        fleet(prefill, decode, trace=TraceConfig(path=tmp_path)) as running,
        AsyncClient(running.grpc) as client,
    ):
        reading = asyncio.create_task(read(client))
        await holding.script.points.reached(point)
        for _ in range(num_tokens):
            await seen.get()
        reading.cancel()
        await running.gateway.wait_idle()
        holding.script.points.release()
    (row,) = requests_of(tmp_path).iter_rows(named=True)
    assert (row["outcome"], row["is_local_prefill"], row["finish_ns"]) == ("cancelled", False, 0)
    assert row["completion_tokens"] == num_tokens
    assert (row["decode_ns"] > 0) == (row["wire_ms"] is not None) == (num_tokens > 0)
    assert (row["transfer_ms"] is None) == (point not in ("start", "step 1"))
    assert (row["land_ms"] is None) == (num_tokens < 2)


async def test_a_row_says_what_its_client_was_told(worker: FakeWorker, tmp_path: Path):
    worker.script.cached_tokens = 2
    async with recorded(worker, tmp_path) as (running, _), AsyncClient(running.grpc) as client:
        told = await client.generate([1, 2, 3, 4], max_tokens=5, request_id="mine")
        worker.script.cached_by_tier = {"host": 1, "ssd": 8}
        await client.generate([1, 2, 3, 4], max_tokens=5)
    row, of_tiers = requests_of(tmp_path).iter_rows(named=True)
    assert [(each["cached_tokens"], each["tier_tokens"]) for each in (row, of_tiers)] == [(2, None), (2, 2)]
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
    absent = ("transfer_ms", "transferred_ns", "handoff_gap_ms", "decode_queue_ms", "error", "session")
    assert [row[name] for name in absent] == [None] * 6


async def test_what_failed_was_refused_or_left_is_a_row_with_its_error(worker: FakeWorker, tmp_path: Path):
    worker.script.cached_tokens, worker.script.cached_by_tier = 2, {"host": 1}
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
    assert found["tier_tokens"].is_null().to_list() == (~has_tokens).to_list()
    assert (found["finish_ns"] > 0).to_list() == [o == "completed" for o in found["outcome"]]
    assert found["lost_ns"].is_null().to_list() == (~is_sent).to_list()
    assert found["worker_decode_ms"].is_not_null().to_list() == [o == "completed" for o in found["outcome"]]


async def test_what_no_column_can_hold_is_null_and_costs_no_other_row(worker: FakeWorker, tmp_path: Path):
    async with recorded(worker, tmp_path) as (running, http), AsyncClient(running.grpc) as client:
        for more in ({"max_tokens": 2**63}, {"n": 2**63}, {"n": 2**62}, {"max_tokens": 2**63 - 1}):
            assert (await http.post("/v1/completions", json=ASKED | more)).status_code == 400
        assert (await http.post("/v1/completions", json=ASKED)).status_code == 200
        with pytest.raises(InvalidArgument):
            await client.generate([1, 2, 3], max_tokens=5, request_id="i" * 10_000)
        assert (await samples(http))["moonshard_trace_failures_total",] == 0
    found = requests_of(tmp_path)
    assert found["max_tokens"].to_list() == [None, 5, 5, 2**63 - 1, 5, 5]
    assert found["num_choices"].to_list() == [1, None, 2**62, 1, 1, 1]
    assert found["request_id"][5] == "i" * 512


async def test_an_unexpected_error_is_told_without_its_words(
    worker: FakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with recorded(worker, tmp_path) as (running, http):

        async def fail(_request: object) -> list[int]:
            raise ValueError("the prompt was: SECRET")

        monkeypatch.setattr(type(running.gateway.model), "tokenize", lambda _model, request: fail(request))
        assert (await http.post("/v1/completions", json=ASKED)).status_code == 500
    (row,) = requests_of(tmp_path).iter_rows(named=True)
    assert (row["outcome"], row["error"]) == ("internal_error", "internal error")


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
    assert row["lost_ns"] == 0  # it had its first token
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
    assert found["session"].to_list() == [affinity_key(f"team-{t}", "its name").hex() for t in "aba"]
    assert not [v for row in found.iter_rows() for v in row if isinstance(v, str) and "team-" in v]


async def test_without_a_path_nothing_is_written_and_nothing_counted(running: RunningGateway, http: httpx.AsyncClient):
    await http.post("/v1/completions", json=ASKED)
    assert not [key for key in await samples(http) if key[0].startswith("moonshard_trace")]


async def test_where_nothing_can_be_written_any_more_everybody_is_served_and_it_is_counted(
    worker: FakeWorker, tmp_path: Path
):
    (tmp_path / "requests").touch()  # where its folder was to be
    async with recorded(worker, tmp_path, max_rows=1) as (_, http):
        found = await samples(http)
        for number in range(1, 4):
            assert (await http.post("/v1/completions", json=ASKED)).status_code == 200
            while (found := await samples(http))["moonshard_trace_failures_total",] < number:  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # it is another thread that counts; `recorded` has a bound
        assert (found["moonshard_trace_failures_total",], found["moonshard_trace_lost_rows_total",]) == (3, 3)
    assert (tmp_path / "requests").read_bytes() == b""
    assert read_table(tmp_path, TOKENS).height == 15


async def test_a_folder_that_nothing_can_be_written_to_ends_the_start(worker: FakeWorker, tmp_path: Path):
    (tmp_path / "a file").touch()
    with pytest.raises(ConfigError, match=r"^trace\.path: .*a file: "):
        async with recorded(worker, tmp_path / "a file"):
            pass
