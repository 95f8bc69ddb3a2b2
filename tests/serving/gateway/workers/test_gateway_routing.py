"""Sessions stay with their worker, prompts go where they are known, and clients are told; keys are asked for."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import pytest

from moonshard.kv.prefix import block_names, root_name, split_names
from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc import inference_pb2_grpc, link_pb2
from moonshard.rpc.client import AsyncClient
from moonshard.serving.config.keys import GatewayConfig
from moonshard.serving.config.tenants import Salts, Tenant, hash_key
from moonshard.serving.gateway.process import RunningGateway, serving
from tests.dialling import own_key
from tests.serving.gateway import fake_worker
from tests.serving.gateway.conftest import make_config
from tests.serving.gateway.fake_worker import BLOCK_SIZE, FakeWorker

NUM_WORKERS = 3
PROMPT = list(range(4 * BLOCK_SIZE))
ONE_TOKEN = {"prompt": [1, 2, 3], "max_tokens": 1}


@pytest.fixture
def workers() -> list[FakeWorker]:
    return [FakeWorker(epoch=bytes([index]) * 16) for index in range(NUM_WORKERS)]


@pytest.fixture
async def running(
    workers: list[FakeWorker], gateway_config: GatewayConfig, model_path: Path
) -> AsyncIterator[RunningGateway]:
    async with AsyncExitStack() as stack:
        ports = [await stack.enter_async_context(fake_worker.serving(worker)) for worker in workers]
        config = make_config(gateway_config, model_path, [f"127.0.0.1:{port}" for port in ports])
        running = await stack.enter_async_context(serving(config))
        pool = running.gateway.pool
        while sum(link.session is not None for link in pool.links) < NUM_WORKERS:
            await pool.wait_changed(0.1)
        yield running


async def complete(
    http: httpx.AsyncClient, prompt: list[int], headers: dict[str, str] | None = None, *, stream: bool = False
) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 2, "stream": stream}
    answer = await http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("stream", [False, True])
async def test_a_session_stays_where_it_is_and_the_client_is_told(http: httpx.AsyncClient, stream: bool):
    name = {"x-session-affinity": "a session"}
    first = await complete(http, [1, 2, 3], stream=stream, headers=name)
    assert first.headers["x-moonshard-affinity"] == "miss"
    for _ in range(4):
        await complete(http, [7, 8, 9])  # others take turns on all workers
        again = await complete(http, [1, 2, 3, 4], stream=stream, headers=name)
        assert again.headers["x-moonshard-affinity"] == "hit"
        assert again.headers["x-moonshard-worker"] == first.headers["x-moonshard-worker"]
    assert "x-moonshard-affinity" not in (await complete(http, [1])).headers


async def test_over_grpc_metadata_names_the_session_and_tells_where_it_is(grpc_client: AsyncClient):
    told = []
    for _ in range(3):
        metadata = (("x-session-affinity", "a session"),)
        async with grpc_client.stream([1, 2, 3], max_tokens=1, metadata=metadata) as stream:
            told.append(await stream.headers())
            assert [delta async for delta in stream]
    assert [headers["x-moonshard-affinity"] for headers in told] == ["miss", "hit", "hit"]
    assert len({headers["x-moonshard-worker"] for headers in told}) == 1


async def lose(running: RunningGateway, workers: list[FakeWorker], address: str) -> FakeWorker:
    """The worker there dies with the next request that it gets."""
    (victim,) = [
        worker for link, worker in zip(running.gateway.pool.links, workers, strict=True) if link.address == address
    ]
    victim.script.may_step.clear()
    await victim.seen(len(victim.runs) + 1)
    victim.die()
    return victim


@pytest.mark.parametrize("stream", [False, True])
async def test_the_worker_that_is_named_is_the_one_that_computed_the_prompt(
    http: httpx.AsyncClient, running: RunningGateway, workers: list[FakeWorker], stream: bool
):
    name = {"x-session-affinity": "a session"}
    first = (await complete(http, [1, 2], name)).headers["x-moonshard-worker"]
    losing = asyncio.create_task(lose(running, workers, first))
    moved = await complete(http, [1, 2, 3], name, stream=stream)
    again = await complete(http, [1, 2, 3, 4], name, stream=stream)
    assert (await losing).num_links > 0
    assert moved.headers["x-moonshard-worker"] == again.headers["x-moonshard-worker"] != first
    assert [answer.headers["x-moonshard-affinity"] for answer in (moved, again)] == ["moved", "hit"]


async def test_a_new_session_that_loses_its_first_worker_is_still_new(
    http: httpx.AsyncClient, running: RunningGateway, workers: list[FakeWorker]
):
    losing = [
        asyncio.create_task(lose(running, workers, link.address)) for link in running.gateway.pool.links[:NUM_WORKERS]
    ]
    asking = asyncio.create_task(complete(http, [1, 2], {"x-session-affinity": "a session"}))
    done, others = await asyncio.wait(losing, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    for worker in workers:
        worker.script.may_step.set()
    assert len(done) == 1
    assert (await asking).headers["x-moonshard-affinity"] == "miss"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_that_refuses_is_named_and_gets_no_session_by_it(
    http: httpx.AsyncClient, running: RunningGateway, workers: list[FakeWorker], stream: bool
):
    name = {"x-session-affinity": "a session"}
    for worker in workers:
        worker.script.failure = link_pb2.Failed(code=8, message="no room", retry_after_s=1.0)
    for _ in range(2):
        body = ONE_TOKEN | {"stream": stream}
        refused = await http.post("/v1/completions", json=body, headers=name)
        assert (refused.status_code, refused.headers["x-moonshard-affinity"]) == (429, "miss")
        assert refused.headers["x-moonshard-worker"] in {link.address for link in running.gateway.pool.links}
        assert refused.headers["retry-after"] == "1"
    for worker in workers:
        worker.script.failure = None
    assert (await complete(http, [1], name, stream=stream)).headers["x-moonshard-affinity"] == "miss"
    for worker in workers:
        worker.script.failure = link_pb2.Failed(code=8, message="no room", retry_after_s=1.0)
    assert (await http.post("/v1/completions", json=ONE_TOKEN, headers=name)).status_code == 429
    for worker in workers:
        worker.script.failure = None
    assert (await complete(http, [1], name, stream=stream)).headers["x-moonshard-affinity"] == "hit"


async def test_an_error_of_a_request_that_was_sent_nowhere_names_no_worker(http: httpx.AsyncClient):
    answer = await http.post("/v1/completions", json={"prompt": [], "max_tokens": 1})
    assert answer.status_code == 400
    assert "x-moonshard-worker" not in answer.headers


async def test_over_grpc_the_worker_that_went_on_is_named_at_the_end(
    running: RunningGateway, workers: list[FakeWorker]
):
    request = pb.GenerateRequest(tokens=pb.TokenIds(ids=[1, 2]), stop=pb.StopConditions(max_tokens=1))
    async with grpc.aio.insecure_channel(running.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def ask() -> tuple[dict, dict]:
            call = stub.Generate(request, metadata=(("x-session-affinity", "a session"),))
            at_first = dict(await call.initial_metadata())
            assert [message async for message in call]
            return at_first, dict(await call.trailing_metadata())

        first, changed = await ask()
        assert not any(key.startswith("x-moonshard") for key in changed)
        losing = asyncio.create_task(lose(running, workers, first["x-moonshard-worker"]))
        second, changed = await ask()
        await losing
    assert (second["x-moonshard-worker"], second["x-moonshard-affinity"]) == (first["x-moonshard-worker"], "hit")
    assert changed["x-moonshard-worker"] != first["x-moonshard-worker"]
    assert changed["x-moonshard-affinity"] == "moved"


LONG = "x" * 10_240  # of 8 KiB upwards gRPC refuses some calls and not others, unless it is told what may come
STRANGE = [LONG.encode(), "☃".encode() * 3_000, b"\xff\xfe", b"a,b;c=d", b"127.0.0.1:50061"]


@pytest.mark.parametrize("name", STRANGE, ids=["10 KB", "not ASCII", "not UTF-8", "a list", "an address"])
async def test_a_session_may_have_any_name(http: httpx.AsyncClient, name: bytes):
    told = []
    for _ in range(2):
        answer = await http.post("/v1/completions", json=ONE_TOKEN, headers=[(b"x-session-affinity", name)])
        assert answer.status_code == 200, answer.text
        told.append(answer.headers["x-moonshard-affinity"])
        await complete(http, [7])  # somewhere else
    assert told == ["miss", "hit"]


async def test_an_empty_name_is_none_and_the_next_one_counts(http: httpx.AsyncClient, grpc_client: AsyncClient):
    empty = {"x-session-affinity": ""}
    for headers in (empty, empty):
        assert "x-moonshard-affinity" not in (await complete(http, [1], headers)).headers
    told = [(await complete(http, [1], empty | {"x-session-id": "s"})).headers for _ in range(2)]
    assert [headers["x-moonshard-affinity"] for headers in told] == ["miss", "hit"]
    async with grpc_client.stream([1], max_tokens=1, metadata=tuple(empty.items())) as stream:
        assert "x-moonshard-affinity" not in await stream.headers()
        assert [delta async for delta in stream]


async def test_over_grpc_a_name_of_ten_kilobytes_is_heard_every_time(grpc_client: AsyncClient):
    told = []
    for _ in range(12):
        async with grpc_client.stream([1, 2], max_tokens=1, metadata=(("x-session-affinity", LONG),)) as stream:
            told.append((await stream.headers())["x-moonshard-affinity"])
            assert [delta async for delta in stream]
    assert told == ["miss"] + ["hit"] * 11


async def test_the_body_may_name_the_session(http: httpx.AsyncClient):
    found = set()
    for _ in range(4):
        body = {"prompt": [1], "max_tokens": 1, "prompt_cache_key": "key"}
        found.add((await http.post("/v1/completions", json=body)).headers["x-moonshard-worker"])
    assert len(found) == 1


async def test_no_client_chooses_its_worker_by_name(http: httpx.AsyncClient):
    wanted = (await complete(http, [1])).headers["x-moonshard-worker"]
    forged = {"x-moonshard-worker": wanted, "x-moonshard-affinity": "hit"}
    answers = [await complete(http, [1], headers=forged) for _ in range(2 * NUM_WORKERS)]
    assert len({answer.headers["x-moonshard-worker"] for answer in answers}) == NUM_WORKERS
    assert all("x-moonshard-affinity" not in answer.headers for answer in answers)


async def test_a_prompt_goes_where_its_beginning_is_known(
    http: httpx.AsyncClient, running: RunningGateway, workers: list[FakeWorker]
):
    limits = running.gateway.limits()
    root = root_name(limits.fingerprint.encode(), limits.dtype.encode(), Salts(own_key().salts).of(Tenant("default")))
    names = block_names(root, PROMPT, BLOCK_SIZE)
    knowing = workers[1]
    await knowing.say(link_pb2.WorkerMessage(prefix_snapshot=link_pb2.PrefixSnapshot(names=[b"".join(names)])))
    while not running.gateway.pool.knowledge.knows(names[0]):
        await running.gateway.pool.wait_changed(0.05)
    for _ in range(3):
        await complete(http, [*PROMPT, 5])
    assert [len(worker.runs) for worker in workers] == [0, 3, 0]
    assert split_names(knowing.runs[0].block_names) == names
    assert knowing.runs[0].prefix_root == root


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(f'[keys]\n{hash_key("one")} = "a"\n{hash_key("two")} = "b"\n')
    return path


class TestKeys:
    @pytest.fixture
    def gateway_config(self, gateway_config: GatewayConfig, keys_file: Path) -> GatewayConfig:
        return replace(gateway_config, keys=keys_file)

    async def test_without_a_known_key_nobody_is_served(self, http: httpx.AsyncClient, workers: list[FakeWorker]):
        for headers in ({}, {"authorization": "Bearer three"}):
            answer = await http.post("/v1/completions", json={"prompt": [1], "max_tokens": 1}, headers=headers)
            assert answer.status_code == 401
            error = answer.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert (error["type"], error["param"], error["code"]) == (
                "invalid_request_error",
                None,
                "invalid_api_key",
            )
            assert "API key" in error["message"]
            assert "three" not in error["message"]
        assert not any(worker.runs for worker in workers)

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            *(("GET", path) for path in ("/v1/models", "/v1/models/kimi")),
            *(("POST", path) for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")),
        ],
    )
    async def test_no_body_is_read_without_a_known_key(self, http: httpx.AsyncClient, method: str, path: str):
        answer = await http.request(method, path, content=b"no JSON" if method == "POST" else None)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        answer = await http.request(method, path, content=b"", headers={"authorization": "Bearer one"})
        assert answer.status_code == (200 if method == "GET" else 400)

    async def test_everybody_may_ask_how_it_is(self, http: httpx.AsyncClient):
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert (await http.get(path)).status_code == 200

    async def test_grpc_asks_for_the_key_in_every_call(self, running: RunningGateway):
        async with grpc.aio.insecure_channel(running.grpc) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            calls = [
                (stub.GetModelInfo, pb.GetModelInfoRequest()),
                (stub.Tokenize, pb.TokenizeRequest(text="a")),
                (stub.Detokenize, pb.DetokenizeRequest(ids=[1])),
            ]
            for call, request in calls:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call(request)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
                await call(request, metadata=[("authorization", "Bearer one")])

    async def test_tenants_share_no_names_of_blocks(self, http: httpx.AsyncClient, workers: list[FakeWorker]):
        for key in ("one", "two", "one"):
            await complete(http, PROMPT, headers={"authorization": f"Bearer {key}"})
        roots = [run.prefix_root for worker in workers for run in worker.runs]
        assert sorted(roots.count(root) for root in set(roots)) == [1, 2]
