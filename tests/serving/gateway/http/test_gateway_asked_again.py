"""A request that its client named so that it may be asked again draws the same tokens, whichever gateway it asks."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.rpc import inference_pb2, inference_pb2_grpc
from moonshard.rpc.client import AsyncClient
from moonshard.rpc.status import InvalidArgument
from moonshard.serving.config.keys import GatewayConfig
from moonshard.serving.config.tenants import Tenant, Tenants, hash_key
from moonshard.serving.control.sampling_parameters import SEED_BITS
from moonshard.serving.gateway.caller import Caller, read_caller
from moonshard.serving.gateway.pipeline.seeds import Seeds
from moonshard.serving.gateway.process import RunningGateway, serving
from tests.serving.gateway import fake_worker
from tests.serving.gateway.conftest import make_config
from tests.serving.gateway.fake_worker import FakeWorker

OPEN = Tenants(None)
BODY = {"model": "kimi", "prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0.8, "n": 2}
NAMES = st.text(min_size=1, max_size=30)
KEYS = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=256)


def headers(**values: str) -> Callable[[str], str | None]:
    return {name.replace("_", "-"): value for name, value in values.items()}.get


def named(tenant: str, key: str | None) -> Caller:
    return Caller(tenant=Tenant(tenant), idempotency_key=key)


@given(NAMES, KEYS, NAMES, KEYS)
def test_a_seed_is_of_cluster_tenant_and_key_together(tenant: str, key: str, other_tenant: str, other_key: str):
    seed = Seeds(b"k" * 32).of(named(tenant, key))
    assert seed == Seeds(b"k" * 32).of(named(tenant, key))
    assert 0 <= seed < 2**SEED_BITS
    assert seed != Seeds(b"j" * 32).of(named(tenant, key))
    is_same = (tenant, key) == (other_tenant, other_key)
    assert (seed == Seeds(b"k" * 32).of(named(other_tenant, other_key))) is is_same
    assert seed != Seeds(b"k" * 32).of(named(tenant + key[:1], key[1:]))  # where one ends is part of it


def test_without_a_key_a_seed_is_drawn():
    assert len({Seeds(b"k" * 32).of(named("a", None)) for _ in range(8)}) == 8


@given(KEYS, st.integers(0, 255), st.integers(0, 255))
def test_prompts_of_one_body_draw_each_its_own(key: str, one: int, other: int):
    seeds = Seeds(b"k" * 32)
    caller = read_caller(OPEN, headers(idempotency_key=key))
    assert (seeds.of(caller.for_prompt(one)) == seeds.of(caller.for_prompt(other))) is (one == other)
    assert caller.for_prompt(0) == caller
    assert named("a", None).for_prompt(one) == named("a", None)


@pytest.mark.parametrize("key", ["", "x" * 257, "caf\u00e9", "a b", "a\tb", "\x7f"])
@pytest.mark.parametrize("name", ["idempotency-key", "x-request-id"])
def test_a_key_that_is_none_is_refused_by_the_headers_name(name: str, key: str):
    with pytest.raises(InvalidArgument, match=f"^{name}: 1 to 256 characters") as refused:
        read_caller(OPEN, {name: key}.get, idempotency=name)
    assert refused.value.field == name


@pytest.fixture
def gateway_config(tmp_path: Path) -> GatewayConfig:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[keys]\n{hash_key("one")} = "a"\n{hash_key("two")} = "b"\n')
    return GatewayConfig(port=0, grpc_port=0, keys=keys)


type Asked = tuple[str, FakeWorker]  # a gateway's URL, and the worker that it has for itself


@pytest.fixture
def one(running: RunningGateway, worker: FakeWorker) -> Asked:
    return running.http, worker


@pytest.fixture
async def other(gateway_config: GatewayConfig, model_path: Path) -> AsyncIterator[Asked]:
    """Another gateway of the cluster."""
    worker = FakeWorker()
    async with (
        fake_worker.serving(worker) as port,
        serving(make_config(gateway_config, model_path, [f"127.0.0.1:{port}"])) as second,
    ):
        await second.gateway.pool.wait_ready()
        yield second.http, worker


async def seeds_of(asked: Asked, key: str | None, *, api_key: str = "one", **body: object) -> list[int]:
    """The seeds that reached the worker of what was asked there, in the order of the prompts."""
    url, worker = asked
    worker.runs.clear()
    sent = {"authorization": f"Bearer {api_key}"} | ({} if key is None else {"idempotency-key": key})
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
        (await http.post("/v1/completions", json=BODY | body, headers=sent)).raise_for_status()
    return [run.sampling.seed for run in sorted(worker.runs, key=lambda run: list(run.prompt_tokens))]


async def test_two_gateways_take_one_seed_for_one_key(one: Asked, other: Asked):
    first = await seeds_of(one, "again")
    assert await seeds_of(other, "again") == first
    assert await seeds_of(other, "other") != first
    assert await seeds_of(other, "again", api_key="two") != first
    assert await seeds_of(other, None) != await seeds_of(other, None)
    assert await seeds_of(other, "again", seed=7) == [7]  # what is said counts
    several = await seeds_of(one, "again", prompt=[[1, 2, 3], [1, 2, 4]])
    assert await seeds_of(other, "again", prompt=[[1, 2, 3], [1, 2, 4]]) == several
    assert several[0] == first[0] != several[1]


async def test_over_grpc_the_key_is_the_requests_id_in_metadata(running: RunningGateway, other: Asked):
    first = await seeds_of(other, "again")
    async with AsyncClient(running.grpc, api_key="one") as client:
        named = await client.generate([1, 2, 3], metadata=(("x-request-id", "again"),), max_tokens=2)
        unnamed = await client.generate([1, 2, 3], metadata=(("idempotency-key", "again"),), max_tokens=2)
    assert [named.summary.seed] == first != [unnamed.summary.seed]


async def test_a_bad_key_is_told_as_a_clients_fault(running: RunningGateway):
    async with httpx.AsyncClient(base_url=running.http, timeout=30, trust_env=False) as http:
        sent = [("authorization", "Bearer one"), ("idempotency-key", "x" * 300)]
        refused = await http.post("/v1/completions", json=BODY, headers=sent)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "idempotency-key")
        sent = [("authorization", "Bearer one"), ("idempotency-key", "a"), ("idempotency-key", "b")]
        refused = await http.post("/v1/completions", json=BODY, headers=sent)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "idempotency-key")
    async with grpc.aio.insecure_channel(running.grpc) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            inference_pb2.GenerateRequest(text="hi"),
            metadata=(("authorization", "Bearer one"), ("x-request-id", "x" * 300)),
        )
        with pytest.raises(grpc.aio.AioRpcError, match="x-request-id: 1 to 256") as failed:
            await call.read()
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
