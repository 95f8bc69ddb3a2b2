"""A deployment whose processes know each other by certificate: it serves, and strangers are told why they are not."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from moonshard.rpc.status import Unavailable
from moonshard.rpc.tls import channel_credentials
from moonshard.serving.config.keys import TlsConfig
from tests.certificates import Authority, needs_openssl
from tests.cluster.conftest import wait_until
from tests.cluster.faults import GANGS, Fleet, Process, running_fleet
from tests.cluster.streams import Ask, Listeners, assert_all_right
from tests.dialling import inspect
from tests.engine_room import long_text

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("cluster"),
    needs_openssl,
]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> TlsConfig:
    return Authority(tmp_path_factory.mktemp("ours"), "ours").issue("machine")


@pytest.fixture(scope="module", params=[pytest.param({}, id="processes"), pytest.param(GANGS, id="gangs")])
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, certificates: TlsConfig
) -> Iterator[Fleet]:
    files = {"tls.cert": certificates.cert, "tls.key": certificates.key, "tls.ca": certificates.ca}
    with running_fleet(tmp_path_factory.mktemp("fleet"), settings={**files, **request.param}) as fleet:
        fleet.credentials = channel_credentials(root_ca=certificates.ca, cert=certificates.cert, key=certificates.key)
        yield fleet


def stranger(fleet: Fleet, folder: Path, tls: TlsConfig | None) -> Process:
    """Another gateway in front of the same workers, with other certificates or none."""
    settings = {key: value for key, value in fleet.gateway.settings.items() if not key.startswith("tls.")}
    if tls is not None:
        settings |= {"tls.cert": tls.cert, "tls.key": tls.key, "tls.ca": tls.ca}
    settings |= {"gateway.port": 0, "gateway.grpc_port": 0}
    return Process("stranger", "gateway", settings, folder / "stranger.log")


def told(gateway: Process) -> Unavailable:
    """The error that a client of that gateway gets once the gateway has tried its workers. It must not hang."""
    lone = Fleet({}, gateway)
    gateway.start()
    try:
        gateway.wait_for("moonshard listening")
        assert wait_until(lambda: gateway.log().count("worker 127.0.0.1") >= 2, 30), gateway.log()
        with lone.client() as client, pytest.raises(Unavailable) as caught:
            client.generate([1, 2, 3], max_tokens=1, timeout_s=30)
        return caught.value
    finally:
        gateway.kill()


def test_a_deployment_in_tls_serves_and_moves_kv(fleet):
    asks = [Ask(prompt=long_text(200, seed=n), max_tokens=20, over="http" if n % 2 else "grpc") for n in range(4)]
    assert_all_right(asks, Listeners(fleet, asks).wait())
    assert fleet.metric("moonshard_request_handoffs_total") >= 4
    fleet.assert_as_it_began()


def test_a_gateway_of_another_authority_is_told_why_at_once(fleet, tmp_path):
    theirs = Authority(tmp_path, "theirs").issue("machine")
    error = told(stranger(fleet, tmp_path, theirs))
    assert "CERTIFICATE_VERIFY_FAILED" in error.message
    assert error.retry_after_s


def test_a_gateway_without_certificates_is_told_that_tls_is_expected(fleet, tmp_path):
    assert "expects TLS" in told(stranger(fleet, tmp_path, None)).message


def test_a_client_in_plain_text_is_refused_by_every_worker(fleet):
    for worker in fleet.workers.values():
        assert inspect(worker.address, fleet.credentials).partitions
        with pytest.raises(grpc.RpcError) as caught:
            inspect(worker.address)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
