"""A worker keeps itself registered with every gateway that a name stands for, whichever these are from one look on."""

import asyncio
import contextlib
from collections.abc import Callable

import pytest

from moonshard.rpc import link_pb2
from moonshard.rpc.server import seldom
from moonshard.serving.gateway.workers.pool import LinkPool
from moonshard.serving.worker.registration import announcer
from moonshard.serving.worker.registration.announcer import Credentials
from moonshard.serving.worker.registration.places import Place, resolve
from moonshard.serving.worker.registration.registrar import Registrar, registered
from tests.dialling import own_key, port_of
from tests.serving.gateway import fake_worker
from tests.serving.gateway.fake_worker import FakeWorker
from tests.serving.gateway.workers.fleet import until
from tests.serving.gateway.workers.registering import registry_over

NAME = "gateways.test:1"
SOON_S = 5.0  # half a second, and the noise of a machine that has other things to do


class Names:
    """A resolver whose answers a test changes."""

    def __init__(self, *registries: str) -> None:
        self.registries = list(registries)
        self.is_away = False
        self.num_looks = 0

    async def __call__(self, gateway: str) -> frozenset[Place]:
        assert gateway == NAME
        self.num_looks += 1
        if self.is_away:
            raise OSError(-2, "Name or service not known")
        return frozenset(Place("127.0.0.1", port_of(registry), "gateways.test") for registry in self.registries)


def registrar(
    worker: FakeWorker,
    port: int,
    names: Names,
    *,
    key: bytes | None = None,
    on_taken: Callable[[str], None] = lambda _told: None,
) -> Registrar:
    announced = link_pb2.Announcement(address=f"127.0.0.1:{port}", welcome=worker.welcome)
    credentials = Credentials(key=own_key().proofs if key is None else key, tls=None)
    return Registrar([NAME], announced, credentials, on_taken, resolve=names, look_s=0.02)


async def looked_again(names: Names) -> None:
    looks = names.num_looks + 2
    await until(lambda: names.num_looks >= looks)


async def wait_gone(pool: LinkPool) -> None:
    """Until goodbye was heard; a lease lasts for a minute."""
    async with asyncio.timeout(SOON_S):
        await until(lambda: not pool.links)


async def test_a_worker_is_known_to_all_gateways_of_a_name_and_leaves_them_all():
    worker = FakeWorker()
    async with (
        registry_over() as (one, at_one),
        registry_over() as (other, at_other),
        fake_worker.serving(worker) as port,
    ):
        names = Names(at_one)
        registering = registrar(worker, port, names)
        async with registered(registering):
            await one.wait_ready()
            assert not other.links
            names.registries.append(at_other)
            await other.wait_ready()
            names.registries.clear()  # and yet both are there
            await looked_again(names)
            names.is_away = True
            await looked_again(names)
            assert (one.is_ready, other.is_ready) == (True, True)
            assert {place.port for place in registering.registered} == {port_of(at_one), port_of(at_other)}
        await wait_gone(one)
        await wait_gone(other)


async def test_a_lease_is_renewed_for_as_long_as_the_worker_is_there():
    worker = FakeWorker()
    async with registry_over(lease_s=0.4) as (pool, at), fake_worker.serving(worker) as port:
        async with registered(registrar(worker, port, Names(at))):
            await pool.wait_ready()
            session = pool.session_at(f"127.0.0.1:{port}")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pool.wait_not_ready(), 1.2)  # three leases
            assert pool.session_at(f"127.0.0.1:{port}") is session
        await wait_gone(pool)


async def test_a_gateway_that_comes_back_is_found_again_soon(caplog):
    worker = FakeWorker()
    async with fake_worker.serving(worker) as port, contextlib.AsyncExitStack() as stack:
        gone = await stack.enter_async_context(contextlib.AsyncExitStack())
        _, at = await gone.enter_async_context(registry_over())
        registering = registrar(worker, port, Names(at))
        await stack.enter_async_context(registered(registering))
        await until(lambda: bool(registering.registered))
        await gone.aclose()
        await until(lambda: not registering.registered)
        async with (
            registry_over(port=port_of(at)) as (pool, _),
            asyncio.timeout(SOON_S),
        ):
            await pool.wait_ready()
    assert caplog.text.count(f"gateway {at}: not registered: ") <= 2
    assert f"gateway {at}: registered" in caplog.text


async def test_who_is_at_its_address_is_told_and_a_worker_that_only_does_not_fit_is_not(caplog):
    holder, claimant = FakeWorker(), FakeWorker(epoch=b"c" * 16)
    unfit = FakeWorker(epoch=b"u" * 16, fingerprint="0" * 64)
    async with (
        registry_over() as (pool, at),
        fake_worker.serving(holder) as port,
        registered(registrar(holder, port, Names(at))),
    ):
        await pool.wait_ready()
        told = asyncio.get_running_loop().create_future()
        async with registered(registrar(claimant, port, Names(at), on_taken=told.set_result)):
            assert await told == f"gateway {at}: another process answers at 127.0.0.1:{port}"
        taken = list[str]()
        async with registered(registrar(unfit, 1, Names(at), on_taken=taken.append)):
            await until(lambda: f"gateway {at}: not registered: not routed to, fingerprint is" in caplog.text)
        assert not taken


async def test_with_another_key_it_is_told_so_once_a_minute(caplog, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(announcer, "RETRY_S", 0.01)
    worker = FakeWorker()
    async with registry_over() as (pool, at), fake_worker.serving(worker) as port:
        names = Names(at)
        async with registered(registrar(worker, port, names, key=b"x" * 32)):
            await until(lambda: "not registered" in caplog.text)
            for _ in range(10):
                await looked_again(names)
            assert not pool.links
            assert caplog.text.count("not registered: it did not prove that it holds the cluster's key") == 1
            monkeypatch.setattr(seldom, "PERIOD_S", 0.0)  # a minute later
            await until(lambda: caplog.text.count("not registered: it did not prove") > 1)


async def test_a_name_that_is_none_is_told_once_and_an_address_is_its_own(caplog):
    worker, names = FakeWorker(), Names()
    names.is_away = True
    async with asyncio.timeout(10), registered(registrar(worker, 1, names)):
        await looked_again(names)
    assert caplog.text.count("worker.gateways: gateways.test:1 cannot be looked up: Name or service not known") == 1
    assert await resolve("127.0.0.1:7") == {Place("127.0.0.1", 7, "127.0.0.1")}
    assert await resolve("[::1]:7") == {Place("::1", 7, "::1")}
    assert Place("::1", 7, "::1").address == "[::1]:7"
