"""Links in mutual TLS, and what a client is told when certificates do not match."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from moonshard.rpc.tls import TlsFiles, server_credentials
from moonshard.serving.config.keys import GatewayConfig, TlsConfig
from moonshard.serving.gateway.process import RunningGateway, serving
from tests.certificates import Authority, needs_openssl
from tests.serving.gateway import fake_worker
from tests.serving.gateway.conftest import make_config
from tests.serving.gateway.fake_worker import FakeWorker

pytestmark = needs_openssl
ASKED = {"model": "kimi", "prompt": [1, 2], "max_tokens": 4}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"), "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("theirs"), "theirs")


@pytest.fixture
def start(gateway_config: GatewayConfig, kimi_folder: Path):
    """A gateway over one worker; None: plain text."""

    @asynccontextmanager
    async def start(worker_tls: TlsConfig | None, gateway_tls: TlsConfig | None) -> AsyncIterator[RunningGateway]:
        credentials = None
        if worker_tls is not None and worker_tls.cert is not None and worker_tls.key is not None:
            files = TlsFiles(cert=worker_tls.cert, key=worker_tls.key, client_ca=worker_tls.ca)
            credentials = server_credentials(files)
        async with asyncio.timeout(60), fake_worker.serving(FakeWorker(), credentials=credentials) as port:
            config = make_config(gateway_config, kimi_folder, [f"127.0.0.1:{port}"])
            async with serving(replace(config, tls=gateway_tls or TlsConfig())) as running:
                yield running

    return start


async def told(running: RunningGateway) -> str:
    """What a client is told once the gateway has tried the worker."""
    link = running.gateway.pool.links[0]
    while link.trouble == "not connected yet":
        await running.gateway.pool.wait_changed(0.01)
    async with httpx.AsyncClient(base_url=running.http, trust_env=False, timeout=30) as http:
        answer = await http.post("/v1/completions", json=ASKED)
    assert answer.status_code == 503
    return answer.json()["error"]["message"]


async def test_a_gateway_and_a_worker_of_one_authority_serve(start, ours: Authority):
    async with start(ours.issue("worker"), ours.issue("gateway")) as running:
        await running.gateway.pool.wait_ready()
        async with httpx.AsyncClient(base_url=running.http, trust_env=False, timeout=30) as http:
            assert (await http.post("/v1/completions", json=ASKED)).status_code == 200


async def test_a_worker_of_another_authority_is_unavailable_for_that_reason(start, ours: Authority, theirs: Authority):
    async with start(theirs.issue("worker"), ours.issue("gateway")) as running:
        assert "CERTIFICATE_VERIFY_FAILED" in await told(running)


async def test_a_certificate_for_another_host_is_unavailable_for_that_reason(start, ours: Authority):
    async with start(ours.issue("elsewhere", address="10.0.0.9"), ours.issue("gateway")) as running:
        assert "Hostname Verification Check failed" in await told(running)


async def test_a_gateway_that_the_worker_does_not_know_says_what_a_closed_connection_can_mean(
    start, ours: Authority, theirs: Authority
):
    strict = replace(ours.issue("worker"), ca=theirs.cert)
    async with start(strict, ours.issue("gateway")) as running:
        assert "refuses this side's certificate" in await told(running)


async def test_a_plain_gateway_before_a_worker_with_tls_says_so(start, ours: Authority):
    async with start(ours.issue("worker"), None) as running:
        assert "expects TLS" in await told(running)


async def test_a_gateway_with_tls_before_a_plain_worker_is_unavailable_for_that_reason(start, ours: Authority):
    async with start(None, ours.issue("gateway")) as running:
        assert "handshake failed" in await told(running)


async def test_where_nobody_listens_the_client_is_told_so(gateway_config: GatewayConfig, kimi_folder: Path):
    async with asyncio.timeout(60), serving(make_config(gateway_config, kimi_folder, ["127.0.0.1:1"])) as running:
        assert await told(running) == "no worker is ready (127.0.0.1:1: Connection refused)"
