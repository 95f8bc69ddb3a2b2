"""Which workers are there, whether they agree, and which of them takes a request or a leg of one."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest

from moonshard.rpc import link_pb2
from moonshard.rpc.status import Unavailable
from moonshard.serving.control.routing.router import Ask, Home
from moonshard.serving.control.routing.ttft import MIN_SAMPLES
from moonshard.serving.gateway.workers import pool as pool_module
from moonshard.serving.gateway.workers.link import WorkerLink
from moonshard.serving.gateway.workers.pool import LinkPool
from moonshard.serving.gateway.workers.session import WorkerSession
from tests.dialling import own_key
from tests.serving.gateway import fake_worker
from tests.serving.gateway.fake_worker import FakeWorker
from tests.serving.gateway.workers.fleet import until

SILENCE_S = 10.0


@asynccontextmanager
async def pool_over(*workers: FakeWorker, silence_s: float = SILENCE_S) -> AsyncIterator[LinkPool]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(60))
        ports = [await stack.enter_async_context(fake_worker.serving(worker)) for worker in workers]
        addresses = [f"127.0.0.1:{port}" for port in ports]
        pool = LinkPool(addresses, on_load=lambda _index, _load: None, silence_s=silence_s, key=own_key().proofs)
        yield await stack.enter_async_context(pool.running())


async def until_there(pool: LinkPool, num_sessions: int) -> None:
    while sum(link.session is not None for link in pool.links) != num_sessions:
        await pool.wait_changed(0.1)


def a_prefill(epoch: bytes = b"p" * 16) -> FakeWorker:
    return FakeWorker(role="prefill", epoch=epoch)


def a_decode(epoch: bytes = b"d" * 16) -> FakeWorker:
    return FakeWorker(role="decode", epoch=epoch)


def epoch_of(worker: FakeWorker) -> int:
    return int.from_bytes(worker.welcome.epoch, "big")


async def test_each_leg_goes_to_a_worker_of_its_role():
    prefills, decodes = [a_prefill(b"p" * 16), a_prefill(b"q" * 16)], [a_decode(), FakeWorker()]
    async with pool_over(*prefills, *decodes) as pool:
        await until_there(pool, 4)
        for _ in range(4):
            with pool.reserve_decode(Ask(num_tokens=10)) as decode, pool.reserve_prefill(Ask(num_tokens=10)) as prefill:
                assert decode.session.epoch in {epoch_of(worker) for worker in decodes}
                assert prefill is not None
                assert prefill.session.epoch in {epoch_of(worker) for worker in prefills}
                assert pool.session_of(prefill.session.epoch) is prefill.session
        assert pool.session_of(17) is None


async def test_a_worker_that_only_prefills_makes_nobody_ready():
    prefill, decode = a_prefill(), a_decode()
    async with pool_over(prefill, decode) as pool:
        await until_there(pool, 2)
        assert (pool.is_ready, pool.has_prefill) == (True, True)
        decode.die()
        await pool.wait_not_ready()
        assert pool.has_prefill
        with pytest.raises(Unavailable, match="only prefills"), pool.reserve_decode(Ask(num_tokens=1)):
            pass


async def test_without_a_prefill_worker_there_is_no_route_for_one():
    async with pool_over(FakeWorker()) as pool:
        await pool.wait_ready()
        assert not pool.has_prefill
        with pool.reserve_prefill(Ask(num_tokens=1)) as route:
            assert route is None


async def test_workers_that_failed_a_request_are_left_out_and_said_so():
    first, second = a_decode(b"1" * 16), a_decode(b"2" * 16)
    async with pool_over(first, second) as pool:
        await until_there(pool, 2)
        for _ in range(3):
            with pool.reserve_decode(Ask(num_tokens=1), exclude={epoch_of(first)}) as route:
                assert route.session.epoch == epoch_of(second)
        both = {epoch_of(first), epoch_of(second)}
        with pytest.raises(Unavailable, match=r"failed this request.*failed this request"):
            pool.reserve_decode(Ask(num_tokens=1), exclude=both).__enter__()


async def test_tokens_are_held_while_the_leg_runs_and_given_back_once_however_it_ends():
    async with pool_over(a_prefill(), a_decode()) as pool:
        await until_there(pool, 2)

        def held() -> list[int]:
            return [pool.in_flight_tokens(link.address) for link in pool.links]

        try:
            with pool.reserve_decode(Ask(num_tokens=10)), pool.reserve_prefill(Ask(num_tokens=7)):
                assert held() == [7, 10]
                raise Unavailable("lost")
        except Unavailable:
            assert held() == [0, 0]


async def test_draining_is_a_change_that_a_waiter_sees_and_a_heartbeat_is_none():
    worker = FakeWorker()
    async with pool_over(worker) as pool:
        await pool.wait_ready()
        assert not await pool.wait_changed(3 * fake_worker.HEARTBEAT_S)
        worker.send_load(draining=True)
        assert await pool.wait_changed(10)
        assert not pool.is_ready
        with pytest.raises(Unavailable, match="draining"), pool.reserve_decode(Ask(num_tokens=1)):
            pass
        worker.send_load(draining=False)
        assert await pool.wait_changed(10)
        assert pool.is_ready


class Walked(tuple[WorkerLink, ...]):
    """Links that count how often somebody looks through all of them."""

    num_walks = 0

    def __iter__(self) -> Iterator[WorkerLink]:
        self.num_walks += 1
        return super().__iter__()


async def test_neither_a_message_nor_a_request_looks_at_all_links_and_only_a_change_does():
    told, other = a_decode(b"1" * 16), a_decode(b"2" * 16)
    async with pool_over(told, other) as pool:
        await until_there(pool, 2)
        pool.links = links = Walked(pool.links)
        session = pool.session_of(epoch_of(told))
        assert session is not None
        links.num_walks, num_received = 0, session.num_received
        for _ in range(5):
            told.send_load(draining=False)
        await until(lambda: session.num_received >= num_received + 5)
        with pool.reserve_decode(Ask(num_tokens=1)):
            assert pool.session_of(epoch_of(other)) is not None
            assert pool.limits is not None
            assert pool.block_size == fake_worker.BLOCK_SIZE
            assert pool.least_ttft_s() is None  # nothing was seen of them
        assert links.num_walks == 0
        told.send_load(draining=True)
        assert await pool.wait_changed(10)
        assert links.num_walks > 0
        with pool.reserve_decode(Ask(num_tokens=1)) as route:
            assert route.session.epoch == epoch_of(other)


async def test_a_worker_that_comes_back_is_found_by_its_new_epoch_alone():
    worker = a_decode(b"1" * 16)
    async with pool_over(worker) as pool:
        await pool.wait_ready()
        worker.die()
        await pool.wait_not_ready()
        assert pool.limits is None
        worker.revive(epoch=b"2" * 16)
        await pool.wait_ready()
        assert pool.session_of(int.from_bytes(b"1" * 16, "big")) is None
        assert pool.session_of(int.from_bytes(b"2" * 16, "big")) is pool.links[0].session


async def test_the_least_time_to_a_first_token_is_that_of_the_soonest_home_and_is_looked_up_seldom(
    monkeypatch: pytest.MonkeyPatch,
):
    workers = [a_decode(b"1" * 16), a_decode(b"2" * 16), a_prefill()]
    async with pool_over(*workers) as pool:
        await until_there(pool, 3)
        assert pool.least_ttft_s() is None
        addresses = [link.address for link in pool.links]
        for address, seconds in zip(addresses, (0.5, 0.25, 4.0), strict=True):
            for _ in range(MIN_SAMPLES):
                pool._ttft.observe(address, own_tokens=1, queued_tokens=0, ttft_s=seconds)
        num_looks, look = 0, pool._router.queues

        def queues(homes: Sequence[Home]) -> np.ndarray:
            nonlocal num_looks
            num_looks += 1
            return look(homes)

        monkeypatch.setattr(pool._router, "queues", queues)
        monkeypatch.setattr(pool_module, "LEAST_TTFT_S", 0)
        assert pool.least_ttft_s() == pytest.approx(0.25)
        workers[1].send_load(draining=True)
        await pool.wait_changed(10)
        assert pool.least_ttft_s() == pytest.approx(0.5)
        monkeypatch.setattr(pool_module, "LEAST_TTFT_S", 60)
        num_looks = 0
        assert {pool.least_ttft_s() for _ in range(100)} == {pool.least_ttft_s()}
        assert num_looks == 0


async def test_workers_may_differ_in_context_and_the_least_of_those_there_holds():
    small, large = FakeWorker(epoch=b"1" * 16), FakeWorker(epoch=b"2" * 16)
    small.welcome.max_context_tokens, large.welcome.max_context_tokens = 100, 900
    async with pool_over(small, large) as pool:
        await until_there(pool, 2)
        assert pool.limits is not None
        assert pool.limits.max_context_tokens == 100
        small.die()
        await until_there(pool, 1)
        assert pool.limits.max_context_tokens == 900


async def test_what_was_said_of_a_handoff_comes_with_its_session_and_a_loss_before_its_requests_fail():
    worker = a_decode()
    heard: list[tuple[WorkerSession, link_pb2.WorkerMessage]] = []
    lost: list[tuple[WorkerSession, bool, bool]] = []
    async with pool_over(worker) as pool:
        pool.on_handoff = lambda session, message: heard.append((session, message))
        await pool.wait_ready()
        with pool.reserve_decode(Ask(num_tokens=1)) as route:
            session = route.session
        inbox = session.open(b"r" * 16)
        pool.on_lost = lambda session: lost.append((session, session.is_lost, inbox.empty()))
        run = link_pb2.Run(request_id=b"r" * 16, prompt_tokens=[1], n=1, max_tokens=2)
        reserve = link_pb2.Reserve(run=run, writer_epoch=b"p" * 16, deadline_s=5)
        session.send(link_pb2.GatewayMessage(reserve=reserve))
        while not heard:
            await pool.wait_changed(0.05)
        assert (heard[0][0], heard[0][1].WhichOneof("message")) == (session, "target")
        worker.die()
        with pytest.raises(Unavailable):
            await inbox.take()
        assert lost == [(session, True, True)]
        assert pool.session_of(session.epoch) is None


async def test_a_worker_that_falls_silent_is_lost_and_one_with_nothing_to_do_is_not():
    silent, idle = FakeWorker(epoch=b"1" * 16), FakeWorker(epoch=b"2" * 16)
    async with pool_over(silent, idle, silence_s=1.5) as pool:
        await until_there(pool, 2)
        session = pool.session_of(epoch_of(silent))
        assert session is not None
        inbox = session.open(b"r" * 16)
        silent.fall_silent()
        with pytest.raises(Unavailable):
            await inbox.take()
        while "nothing came from it for 1.5 s" not in str(pool.unavailable()):
            await pool.wait_changed(0.05)
        assert pool.links[0].session is None
        assert idle.num_links == 1
        silent.speak()
        await until_there(pool, 2)
        assert pool.links[0].num_restarts == 0
        assert idle.num_links == 1


async def test_a_worker_that_is_still_loading_is_waited_for_however_long_it_takes():
    worker = FakeWorker()
    worker.fall_silent()
    async with pool_over(worker, silence_s=0.1) as pool:
        assert not await pool.wait_changed(1)
        worker.speak()
        await pool.wait_ready()
        assert worker.num_links == 1
