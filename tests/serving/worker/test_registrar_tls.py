"""With [tls], worker and registry show each other certificates, and a gateway's is for what `worker.gateways` has."""

from dataclasses import replace
from pathlib import Path

import pytest

from moonshard.rpc import link_pb2
from moonshard.serving.config.keys import Config, ModelConfig, TlsConfig
from moonshard.serving.config.tls import link_credentials, server_tls
from moonshard.serving.worker.registration.announcer import Credentials
from moonshard.serving.worker.registration.places import Place
from moonshard.serving.worker.registration.registrar import Registrar, registered
from tests.certificates import Authority, needs_openssl
from tests.dialling import own_key, port_of
from tests.serving.gateway.fake_worker import FakeWorker
from tests.serving.gateway.workers.fleet import until
from tests.serving.gateway.workers.registering import registry_over

pytestmark = needs_openssl
NAME = "gateways.test"


def with_tls(tls: TlsConfig) -> Config:
    return Config(model=ModelConfig(path=Path(), name="any"), tls=tls)


def registrar(at: str, tls: TlsConfig) -> Registrar:
    async def resolve(_: str) -> frozenset[Place]:
        return frozenset({Place("127.0.0.1", port_of(at), NAME)})

    announced = link_pb2.Announcement(address="127.0.0.1:1", welcome=FakeWorker().welcome)
    credentials = Credentials(key=own_key().proofs, tls=link_credentials(with_tls(tls)))
    return Registrar([f"{NAME}:1"], announced, credentials, lambda _told: None, resolve=resolve)


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


async def test_a_worker_registers_by_the_name_for_which_the_gateways_certificate_is(ours: Authority):
    gateway = ours.issue("gateway", address="10.0.0.9", names=[NAME])
    async with (
        registry_over(tls=server_tls(with_tls(gateway))) as (pool, at),
        registered(registrar(at, ours.issue("worker"))),
    ):
        await until(lambda: bool(pool.links))


async def test_a_gateway_whose_certificate_is_for_another_name_hears_nothing(ours: Authority, caplog):
    async with registry_over(tls=server_tls(with_tls(ours.issue("gateway", names=["other.test"])))) as (pool, at):
        async with registered(registrar(at, ours.issue("worker"))):
            await until(lambda: "Hostname Verification Check failed" in caplog.text)
        assert not pool.links


async def test_the_clusters_key_alone_does_not_do(ours: Authority, tmp_path_factory: pytest.TempPathFactory, caplog):
    theirs = Authority(tmp_path_factory.mktemp("theirs"), "theirs")
    strict = with_tls(ours.issue("gateway", names=[NAME]))
    stranger = replace(theirs.issue("worker"), ca=ours.cert)
    async with registry_over(tls=server_tls(strict)) as (pool, at):
        async with registered(registrar(at, stranger)):
            await until(lambda: f"gateway {at}: not registered" in caplog.text)
        assert not pool.links
