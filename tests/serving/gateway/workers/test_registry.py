"""Workers that come and go: who registers is linked and routed to, who leaves is forgotten, and who lies is refused."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import httpx
import pytest

from moonshard.rpc import link_pb2
from moonshard.rpc.server.door import ServerUnproved
from moonshard.rpc.status import from_rpc_error
from moonshard.serving.config.keys import GatewayConfig
from moonshard.serving.control.members.roster import LEASE_TICKS
from moonshard.serving.gateway.process import serving
from moonshard.serving.gateway.workers import link as link_under_test
from moonshard.serving.gateway.workers import registry as under_test
from moonshard.serving.gateway.workers.pool import LinkPool
from tests.serving.gateway import fake_worker
from tests.serving.gateway.conftest import FIXTURE, make_config
from tests.serving.gateway.fake_worker import FakeWorker
from tests.serving.gateway.workers.fleet import ask, fleet, until
from tests.serving.gateway.workers.registering import NOBODY, REGISTER, announcement, registry_over, stream_to

GOODBYE = link_pb2.WorkerNotice(goodbye=link_pb2.Goodbye())
RENEWAL = link_pb2.WorkerNotice(renewal=link_pb2.Renewal())
SOON_S = 5.0  # some tens of milliseconds, and the noise of a machine that has other things to do


def a_worker(number: int = 1) -> FakeWorker:
    return FakeWorker(epoch=b"%016d" % number)


@asynccontextmanager
async def registered(registry: str, worker: FakeWorker, port: int) -> AsyncIterator[grpc.aio.StreamStreamCall]:
    async with stream_to(registry) as call:
        await call.write(announcement(worker, f"127.0.0.1:{port}"))
        assert isinstance(await call.read(), link_pb2.Lease)
        yield call


async def refusal(registry: str, notice: link_pb2.WorkerNotice) -> grpc.aio.AioRpcError:
    async with stream_to(registry) as call:
        await call.write(notice)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        return refused.value


async def say_goodbye(call: grpc.aio.StreamStreamCall) -> None:
    """Until the gateway has heard it, and ends the stream."""
    await call.write(GOODBYE)
    assert not isinstance(await call.read(), link_pb2.Lease)


async def until_workers(pool: LinkPool, *addresses: str) -> None:
    while pool.worker_states() != dict.fromkeys(addresses, "ready"):
        await pool.wait_changed(0.05)


def assert_nothing_known(pool: LinkPool) -> None:
    dispatcher = pool.knowledge.dispatcher
    assert (pool.links, dispatcher.fleet._order, dispatcher.router._numbers) == ((), {}, {})
    assert len(dispatcher.router.index) == 0
    assert not pool.knowledge._heard


async def test_who_registers_serves_soon_and_who_says_goodbye_is_forgotten():
    worker = a_worker()
    async with registry_over() as (pool, registry), fake_worker.serving(worker) as port:
        assert "none has registered" in str(pool.unavailable())
        begun_s = time.monotonic()
        async with registered(registry, worker, port) as call:
            await pool.wait_ready()
            assert time.monotonic() - begun_s < SOON_S
            assert pool.worker_states() == {f"127.0.0.1:{port}": "ready"}
            session = pool.session_at(f"127.0.0.1:{port}")
            assert session is not None
            await say_goodbye(call)
        assert session.is_lost
        assert not pool.is_ready
        assert_nothing_known(pool)
        await until(lambda: not pool._tasks)


async def test_a_stream_that_breaks_off_ends_nothing_and_a_lease_that_is_not_renewed_does(caplog):
    worker, lease_s = a_worker(), 0.4
    async with registry_over(lease_s=lease_s) as (pool, registry), fake_worker.serving(worker) as port:
        async with registered(registry, worker, port) as call:
            await pool.wait_ready()
            for _ in range(2 * LEASE_TICKS):
                await asyncio.sleep(lease_s / LEASE_TICKS)  # the lease's own clock
                await call.write(RENEWAL)
            assert pool.is_ready
        assert pool.is_ready
        await pool.wait_not_ready()
        assert_nothing_known(pool)
    assert f"worker 127.0.0.1:{port}: did not renew its registration for 0.4 s" in caplog.text


async def test_a_worker_that_cannot_be_forgotten_keeps_no_other_leases_from_their_end(caplog):
    def fails(index: int) -> None:
        raise LookupError(f"worker {index}")

    async with registry_over(lease_s=0.2, events=replace(NOBODY, on_removed=fails)) as (pool, registry):
        async with registered(registry, a_worker(1), 1), registered(registry, a_worker(2), 2):
            assert len(pool.links) == 2
        await until(lambda: not pool.links)
    assert "worker 127.0.0.1:1: could not be forgotten" in caplog.text


async def test_after_its_lease_has_ended_a_worker_must_register_anew():
    worker = a_worker()
    async with registry_over(lease_s=0.2) as (pool, registry), fake_worker.serving(worker) as port:
        async with registered(registry, worker, port) as call:
            await pool.wait_ready()
            await pool.wait_not_ready()
            await call.write(RENEWAL)
            with pytest.raises(grpc.aio.AioRpcError, match="the lease has ended") as ended:
                await call.read()
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        async with registered(registry, worker, port):
            await pool.wait_ready()


async def test_a_worker_that_comes_back_at_its_address_is_called_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(link_under_test, "FIRST_RETRY_S", 20.0)  # until its link would try again
    old, new = a_worker(1), a_worker(2)
    async with registry_over() as (pool, registry):
        async with fake_worker.serving(old) as port, registered(registry, old, port):
            await pool.wait_ready()
        await pool.wait_not_ready()
        link = pool.links[0]
        async with fake_worker.serving(new, port):
            begun_s = time.monotonic()
            async with registered(registry, new, port):
                await pool.wait_ready()
            assert time.monotonic() - begun_s < SOON_S
            assert pool.links == (link,)
            assert link.num_restarts == 1


async def test_an_address_is_whose_who_answers_there(caplog):
    holder, claimant = a_worker(1), a_worker(2)
    async with (
        registry_over() as (pool, registry),
        fake_worker.serving(holder) as port,
        registered(registry, holder, port) as call,
    ):
        await pool.wait_ready()
        for _ in range(2):
            refused = await refusal(registry, announcement(claimant, f"127.0.0.1:{port}"))
            assert refused.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert refused.details() == f"another process answers at 127.0.0.1:{port}"
            assert from_rpc_error(refused).field == "address"
        session = pool.session_at(f"127.0.0.1:{port}")
        assert session is not None
        assert not session.is_lost
        await call.write(RENEWAL)
        await say_goodbye(call)
    assert caplog.text.count("another process answers") == 1


async def test_who_had_an_address_and_says_no_more_does_not_end_who_claims_it():
    """A process that has ended without a word, as with its machine: its link is up until its silence is noticed."""
    holder, claimant = a_worker(1), a_worker(2)
    async with (
        registry_over() as (pool, registry),
        fake_worker.serving(holder) as port,
        registered(registry, holder, port),
    ):
        await pool.wait_ready()
        holder.fall_silent()
        refused = await refusal(registry, announcement(claimant, f"127.0.0.1:{port}"))
        assert refused.code() is grpc.StatusCode.UNAVAILABLE
        holder.die()
        await pool.wait_not_ready()
        holder.speak()
        holder.revive(epoch=claimant.welcome.epoch)
        async with registered(registry, claimant, port):
            await pool.wait_ready()


async def test_a_worker_that_does_not_fit_is_told_which_field_and_may_come_once_it_does(caplog):
    first, other = a_worker(1), FakeWorker(epoch=b"%016d" % 2, fingerprint="0" * 64)
    async with (
        registry_over() as (pool, registry),
        fake_worker.serving(first) as first_port,
        fake_worker.serving(other) as other_port,
    ):
        async with registered(registry, first, first_port) as call:
            await pool.wait_ready()
            refused = await refusal(registry, announcement(other, f"127.0.0.1:{other_port}"))
            assert refused.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "fingerprint is '000" in str(refused.details())
            assert list(pool.worker_states()) == [f"127.0.0.1:{first_port}"]
            await say_goodbye(call)
        async with registered(registry, other, other_port):
            await until_workers(pool, f"127.0.0.1:{other_port}")
    assert f"worker 127.0.0.1:{other_port}: not routed to, fingerprint is" in caplog.text


async def test_indices_stay_and_are_given_again_from_the_lowest():
    removed = list[int]()
    async with registry_over(events=replace(NOBODY, on_removed=removed.append)) as (pool, _):
        for number in range(3):
            pool.call(f"127.0.0.1:{number + 1}")
        pool.remove("127.0.0.1:2")
        assert [(link.address, pool.index_of(link.address)) for link in pool.links] == [
            ("127.0.0.1:1", 0),
            ("127.0.0.1:3", 2),
        ]
        pool.call("127.0.0.1:9")
        pool.call("127.0.0.1:8")
        assert [pool.index_of(link.address) for link in pool.links] == [0, 1, 2, 3]
        assert [link.address for link in pool.links][1] == "127.0.0.1:9"
        assert removed == [1]
        with pytest.raises(KeyError):
            pool.remove("127.0.0.1:2")


async def test_no_task_is_left_of_workers_that_came_and_went():
    async with registry_over() as (pool, _):
        for _ in range(20):
            pool.call("127.0.0.1:9")
            pool.remove("127.0.0.1:9")
        await until(lambda: not pool._tasks)
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("link ")]


async def test_nobody_without_the_clusters_key_registers_and_it_is_logged_once_a_minute(caplog):
    async with registry_over() as (pool, registry):
        for _ in range(5):
            with pytest.raises(ServerUnproved):
                async with stream_to(registry, key=b"x" * 32):
                    raise AssertionError("it was let in")
        async with grpc.aio.insecure_channel(registry) as channel:
            for _ in range(3):
                call = channel.stream_stream(REGISTER)(iter([b"no proof"]))
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call.read()
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert pool.links == ()
    turned_away = [record for record in caplog.records if "is turned away" in record.message]
    assert len(turned_away) <= 2  # by reasons
    assert turned_away


async def test_a_gateway_serves_who_registers_and_its_metrics_forget_who_leaves():
    worker = a_worker()
    config = make_config(GatewayConfig(port=0, grpc_port=0, registry="grpc", registry_port=0), FIXTURE, [])
    async with (
        serving(config) as running,
        fake_worker.serving(worker) as port,
        httpx.AsyncClient(base_url=running.http, trust_env=False) as http,
    ):
        assert running.registry is not None
        assert (await http.get("/ready")).status_code == 503
        async with registered(running.registry, worker, port) as call:
            await running.gateway.pool.wait_ready()
            assert (await ask(running, "http whole")).num_billed > 0
            assert f'worker="127.0.0.1:{port}"' in (await http.get("/metrics")).text
            await say_goodbye(call)
        assert f"127.0.0.1:{port}" not in (await http.get("/metrics")).text
        assert (await http.get("/ready")).status_code == 503


@pytest.mark.parametrize("address", ["[::1]:9", "worker-0.workers.default.svc:50061", "10.0.0.2:1"])
async def test_an_address_may_be_a_name_or_of_either_kind(address: str):
    async with registry_over() as (pool, registry), stream_to(registry) as call:
        await call.write(announcement(a_worker(), address))
        assert isinstance(await call.read(), link_pb2.Lease)
        assert [link.address for link in pool.links] == [address]


async def test_who_was_let_in_and_announces_nothing_is_sent_away(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(under_test, "ANNOUNCED_WITHIN_S", 0.05)
    async with registry_over() as (pool, registry), stream_to(registry) as call:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert pool.links == ()


async def test_where_clients_call_there_is_no_registry():
    async with fleet(a_worker()) as running, grpc.aio.insecure_channel(running.grpc) as channel:
        assert running.registry is None
        call = channel.stream_stream(REGISTER)(iter([b""]))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("notice", "field"),
    [
        (RENEWAL, "announcement"),
        (announcement(a_worker(), "nowhere"), "address"),
        (announcement(a_worker(), "127.0.0.1:0"), "address"),
        (announcement(a_worker(), "evil\nline:1"), "address"),
        (announcement(a_worker(), "x" * 300 + ":1"), "address"),
        (announcement(a_worker(), "unix:/run/somewhere:1"), "address"),
        (announcement(a_worker(), "dns://10.0.0.1/worker:1"), "address"),
        (announcement(a_worker(), "127.0.0.1:1,127.0.0.2:1"), "address"),
        (announcement(a_worker(), "::1:1"), "address"),
        (announcement(FakeWorker(epoch=b"short"), "127.0.0.1:1"), "epoch"),
    ],
)
async def test_what_names_no_worker_is_refused(notice: link_pb2.WorkerNotice, field: str):
    async with registry_over() as (pool, registry):
        refused = await refusal(registry, notice)
        assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert field in str(refused.details())
        assert pool.links == ()


async def test_there_are_bounds_to_workers_to_messages_and_to_renewals(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(under_test, "MAX_WORKERS", 2)
    async with registry_over() as (pool, registry):
        async with registered(registry, a_worker(1), 1) as call, registered(registry, a_worker(2), 2):
            refused = await refusal(registry, announcement(a_worker(3), "127.0.0.1:3"))
            assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert len(pool.links) == 2
            for _ in range(under_test.MAX_NOTICES + 1):
                await call.write(RENEWAL)
            with pytest.raises(grpc.aio.AioRpcError, match="more than 64 in 60 s"):
                await call.read()
        large = announcement(FakeWorker(epoch=b"%016d" % 4, fingerprint="f" * (1 << 20)), "127.0.0.1:1")
        assert (await refusal(registry, large)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
