"""Which workers are connected, whether they agree on the model, and which one takes a request or a leg of it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace

import pytest

from moonshard.rpc import link_pb2
from moonshard.rpc.status import Unavailable
from moonshard.serving.config.keys import RoutingConfig
from moonshard.serving.control.dispatch.attempt import Attempt
from moonshard.serving.control.dispatch.dispatcher import Demand, NoWorker
from moonshard.serving.control.dispatch.retries import Retries
from moonshard.serving.gateway.workers.dispatching import dispatcher_of
from moonshard.serving.gateway.workers.knowledge import Knowledge
from moonshard.serving.gateway.workers.link import WorkerLink
from moonshard.serving.gateway.workers.pool import LinkPool, PoolEvents
from moonshard.serving.gateway.workers.session import WorkerSession
from tests.dialling import own_key
from tests.serving.gateway import fake_worker
from tests.serving.gateway.fake_worker import FakeWorker
from tests.serving.gateway.workers.fleet import until

SILENCE_S = 10.0
DEMAND = Demand(num_prompt=7, max_new_tokens=3)


NOBODY = PoolEvents(on_load=lambda *_: None, on_handoff=lambda *_: None, on_lost=lambda *_: None)


@asynccontextmanager
async def pool_over(
    *workers: FakeWorker, silence_s: float = SILENCE_S, events: PoolEvents = NOBODY
) -> AsyncIterator[LinkPool]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(60))
        ports = [await stack.enter_async_context(fake_worker.serving(worker)) for worker in workers]
        addresses = [f"127.0.0.1:{port}" for port in ports]
        knowledge = Knowledge(dispatcher_of(addresses, RoutingConfig(local_prefill="static")))
        pool = LinkPool(addresses, knowledge, events, silence_s=silence_s, key=own_key().proofs)
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


@contextmanager
def dispatched(pool: LinkPool, *failed: FakeWorker) -> Iterator[Attempt]:
    """An attempt at a request that these workers have failed."""
    dispatcher = pool.knowledge.dispatcher
    retries = Retries(max_attempts=9, failed_epochs={epoch_of(worker) for worker in failed})
    attempt = dispatcher.begin(DEMAND, retries, 0.0)
    assert isinstance(attempt, Attempt)
    try:
        yield attempt
    finally:
        dispatcher.end(attempt)


def refusal(pool: LinkPool) -> str:
    """What a request is told that is not dispatched."""
    assert pool.knowledge.dispatcher.begin(DEMAND, Retries(max_attempts=9), 0.0) == NoWorker()
    return str(pool.unavailable())


async def test_each_leg_goes_to_a_worker_of_its_role():
    prefills, decodes = [a_prefill(b"p" * 16), a_prefill(b"q" * 16)], [a_decode(b"d" * 16), a_decode(b"e" * 16)]
    async with pool_over(*prefills, *decodes) as pool:
        await until_there(pool, 4)
        for _ in range(4):
            with dispatched(pool) as attempt:
                assert attempt.decode.epoch in {epoch_of(worker) for worker in decodes}
                assert attempt.prefill is not None
                assert attempt.prefill.epoch in {epoch_of(worker) for worker in prefills}
                session = pool.knowledge.session_at(attempt.prefill.home.worker)
                assert session.epoch == attempt.prefill.epoch
                assert pool.knowledge.session_of(session.epoch) is session
        assert pool.knowledge.session_of(17) is None


async def test_a_worker_that_only_prefills_makes_nobody_ready():
    prefill, decode = a_prefill(), a_decode()
    async with pool_over(prefill, decode) as pool:
        await until_there(pool, 2)
        fleet = pool.knowledge.dispatcher.fleet
        assert (pool.is_ready, fleet.has_prefill) == (True, True)
        decode.die()
        await pool.wait_not_ready()
        assert fleet.has_prefill
        assert "only prefills" in refusal(pool)


async def test_a_pool_is_complete_once_there_is_a_worker_for_each_leg():
    async with pool_over(a_decode()) as pool, fake_worker.serving(a_prefill()) as port:
        await pool.wait_ready()
        assert await pool.wait_complete(0.01), "nobody waits longer than that"
        assert not pool.knowledge.dispatcher.fleet.is_complete
        waiting = asyncio.create_task(pool.wait_complete(60))
        pool.call(f"127.0.0.1:{port}")
        assert await waiting
        assert pool.knowledge.dispatcher.fleet.is_complete


async def test_a_worker_that_does_both_completes_a_pool():
    async with pool_over(FakeWorker()) as pool:
        await pool.wait_ready()
        assert await pool.wait_complete(60)
        assert pool.knowledge.dispatcher.fleet.is_complete


async def test_nobody_waits_for_a_pool_to_be_complete_once_nobody_decodes():
    decode = a_decode()
    async with pool_over(decode) as pool:
        await pool.wait_ready()
        waiting = asyncio.create_task(pool.wait_complete(60))
        await asyncio.sleep(0)  # it waits now
        assert not waiting.done()
        decode.die()
        assert not await waiting


async def test_without_a_prefill_worker_there_is_no_leg_for_one():
    async with pool_over(a_decode()) as pool:
        await pool.wait_ready()
        assert not pool.knowledge.dispatcher.fleet.has_prefill
        with dispatched(pool) as attempt:
            assert attempt.prefill is None


async def test_workers_that_failed_a_request_are_left_out():
    first, second = a_decode(b"1" * 16), a_decode(b"2" * 16)
    async with pool_over(first, second) as pool:
        await until_there(pool, 2)
        for _ in range(3):
            with dispatched(pool, first) as attempt:
                assert attempt.decode.epoch == epoch_of(second)


async def test_tokens_are_held_while_the_legs_run_and_given_back_once_however_they_end():
    async with pool_over(a_prefill(), a_decode()) as pool:
        await until_there(pool, 2)

        def held() -> list[int]:
            return [pool.in_flight_tokens(link.address) for link in pool.links]

        try:
            with dispatched(pool):
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
        assert "draining" in refusal(pool)
        worker.send_load(draining=False)
        assert await pool.wait_changed(10)
        assert pool.is_ready


class Walked(tuple[WorkerLink, ...]):
    """Links that count how often somebody looks through all of them."""

    num_walks = 0

    def __iter__(self) -> Iterator[WorkerLink]:
        self.num_walks += 1
        return super().__iter__()


async def test_neither_a_message_nor_a_request_nor_a_change_looks_at_all_links():
    told, other = a_decode(b"1" * 16), a_decode(b"2" * 16)
    async with pool_over(told, other) as pool:
        await until_there(pool, 2)
        pool.links = links = Walked(pool.links)
        knowledge = pool.knowledge
        session = knowledge.session_of(epoch_of(told))
        assert session is not None
        links.num_walks, num_received = 0, session.num_received
        for _ in range(5):
            told.send_load(draining=False)
        await until(lambda: session.num_received >= num_received + 5)
        with dispatched(pool):
            assert knowledge.session_of(epoch_of(other)) is not None
            assert pool.limits is not None
            assert pool.limits.block_size == fake_worker.BLOCK_SIZE
            assert knowledge.dispatcher.least_ttft_s(0.0) is None  # nothing was seen of them
        told.send_load(draining=True)
        assert await pool.wait_changed(10)
        with dispatched(pool) as attempt:
            assert attempt.decode.epoch == epoch_of(other)
        assert links.num_walks == 0
        assert "ready" in pool.worker_states().values()
        assert links.num_walks > 0


async def test_a_worker_that_comes_back_is_found_by_its_new_epoch_alone():
    worker = a_decode(b"1" * 16)
    async with pool_over(worker) as pool:
        await pool.wait_ready()
        worker.die()
        await pool.wait_not_ready()
        assert pool.limits is None
        worker.revive(epoch=b"2" * 16)
        await pool.wait_ready()
        assert pool.knowledge.session_of(int.from_bytes(b"1" * 16, "big")) is None
        assert pool.knowledge.session_of(int.from_bytes(b"2" * 16, "big")) is pool.links[0].session


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
    events = replace(
        NOBODY,
        on_handoff=lambda session, message: heard.append((session, message)),
        on_lost=lambda session: lost.append((session, session.is_lost, session.inboxes[b"r" * 16].empty())),
    )
    async with pool_over(worker, events=events) as pool:
        await pool.wait_ready()
        session = pool.knowledge.session_of(epoch_of(worker))
        assert session is not None
        inbox = session.open(b"r" * 16)
        run = link_pb2.Run(request_id=b"r" * 16, prompt_tokens=[1], n=1, max_tokens=2)
        reserve = link_pb2.Reserve(run=run, writer_epoch=b"p" * 16, lease_s=5)
        session.send(link_pb2.GatewayMessage(reserve=reserve))
        while not heard:
            await pool.wait_changed(0.05)
        assert (heard[0][0], heard[0][1].WhichOneof("message")) == (session, "target")
        worker.die()
        with pytest.raises(Unavailable):
            await inbox.take()
        assert lost == [(session, True, True)]
        assert pool.knowledge.session_of(session.epoch) is None


async def test_a_worker_that_falls_silent_is_lost_and_one_with_nothing_to_do_is_not():
    silent, idle = FakeWorker(epoch=b"1" * 16), FakeWorker(epoch=b"2" * 16)
    async with pool_over(silent, idle, silence_s=1.5) as pool:
        await until_there(pool, 2)
        session = pool.knowledge.session_of(epoch_of(silent))
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


async def test_a_worker_that_is_elsewhere_now_is_called_there_and_keeps_its_index():
    here, elsewhere, other = a_decode(b"d" * 16), a_decode(b"e" * 16), a_prefill()
    lost: list[WorkerSession] = []
    events = replace(NOBODY, on_lost=lost.append)
    async with fake_worker.serving(elsewhere) as port, pool_over(here, other, events=events) as pool:
        await until_there(pool, 2)
        beside = pool.links[1].address
        session, kept = (link.session for link in pool.links)
        assert session is not None
        inbox = session.open(b"r" * 16)
        now = f"127.0.0.1:{port}"
        pool.move([now, beside])
        with pytest.raises(Unavailable, match="went away"):
            await inbox.take()
        await until_there(pool, 2)
        assert lost == [session]
        assert [link.address for link in pool.links] == [now, beside]
        assert pool.links[1].session is kept
        with dispatched(pool) as attempt:
            assert attempt.decode.epoch == epoch_of(elsewhere)
        assert pool.index_of(now) == 0
        assert pool.worker_states() == {now: "ready", beside: "ready"}
        pool.move([now, beside])  # as a supervisor may say again
        assert pool.links[1].session is kept
        assert lost == [session]
