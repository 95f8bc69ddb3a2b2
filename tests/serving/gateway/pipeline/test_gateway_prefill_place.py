"""A prompt is prefilled where it is decoded when that is said, or costs less; a reservation is never left behind."""

import asyncio

import pytest

from moonshard.kv.prefix import block_names, root_name
from moonshard.rpc import link_pb2
from moonshard.rpc.client import AsyncClient
from moonshard.serving.config.tenants import Salts, Tenant
from moonshard.serving.gateway.process import RunningGateway
from tests.dialling import own_key
from tests.serving.gateway.fake_worker import BLOCK_SIZE, FakeWorker, expected_tokens
from tests.serving.gateway.workers.fleet import PROMPT, assert_nothing_left, decode_worker, fleet, prefill_worker, until

LONG_QUEUE_TOKENS = 1_000_000


@pytest.fixture
def prefill() -> FakeWorker:
    return prefill_worker()


@pytest.fixture
def decode() -> FakeWorker:
    return decode_worker()


async def complete(running: RunningGateway) -> None:
    async with AsyncClient(running.grpc) as client:
        completion = await client.generate(PROMPT, max_tokens=4)
    assert list(completion.choices[0].token_ids) == expected_tokens(PROMPT, 4)


async def queue(running: RunningGateway, prefill: FakeWorker, num_tokens: int) -> None:
    """The worker reports that many tokens before the next prompt; returns when the gateway has heard it."""
    prefill.load.queued_tokens[:] = [num_tokens]
    prefill.send_load(draining=False)
    session = next(link.session for link in running.gateway.pool.links if link.role == "prefill")
    assert session is not None
    await until(lambda: list(session.load.queued_tokens) == [num_tokens])


@pytest.mark.parametrize(("min_known", "is_local"), [(0.8, True), (0.81, False), (1.0, False)])
async def test_a_prompt_that_decode_knows_is_prefilled_there(
    prefill: FakeWorker, decode: FakeWorker, min_known: float, is_local: bool
):
    async with fleet(prefill, decode, local_prefill_min_known=min_known) as running:
        limits = running.gateway.limits()
        root = root_name(
            limits.fingerprint.encode(), limits.dtype.encode(), Salts(own_key().salts).of(Tenant("default"))
        )
        names = block_names(root, PROMPT, BLOCK_SIZE)  # of 32 tokens of its 40
        await decode.say(link_pb2.WorkerMessage(prefix_snapshot=link_pb2.PrefixSnapshot(names=[b"".join(names)])))
        await until(lambda: running.gateway.pool.knowledge.knows(names[-1]))
        await complete(running)
        assert (len(decode.runs), len(prefill.runs)) == ((1, 0) if is_local else (0, 1))


async def test_by_cost_decode_prefills_once_the_queue_before_prefill_takes_longer(
    prefill: FakeWorker, decode: FakeWorker
):
    async with fleet(prefill, decode, local_prefill="cost") as running:
        await queue(running, prefill, LONG_QUEUE_TOKENS)
        for _ in range(4):  # nothing is known yet of how long that takes
            await complete(running)
        assert (len(prefill.runs), len(decode.runs)) == (4, 0)
        decode.script.may_step.clear()
        completing = asyncio.create_task(complete(running))
        await decode.seen(1)
        address = next(link.address for link in running.gateway.pool.links if link.role == "prefill")
        assert running.gateway.pool.in_flight_tokens(address) == 0
        decode.script.may_step.set()
        await completing
        assert (len(prefill.runs), len(decode.runs)) == (4, 1)
        await queue(running, prefill, 0)
        decode.load.num_running = 8  # they would wait
        decode.send_load(draining=False)
        await until(lambda: any(link.last_load.num_running == 8 for link in running.gateway.pool.links))
        await complete(running)
        assert (len(prefill.runs), len(decode.runs)) == (5, 1)
        await running.gateway.wait_idle()
        assert_nothing_left(running)


async def test_by_cost_a_burst_is_shared_between_both_places_though_no_report_tells_of_it(
    prefill: FakeWorker, decode: FakeWorker
):
    async with fleet(prefill, decode, local_prefill="cost") as running:
        for _ in range(4):
            await complete(running)
        decode.script.may_step.clear()
        prefill.script.may_step.clear()
        burst = [asyncio.create_task(complete(running)) for _ in range(12)]
        await until(lambda: len(decode.runs) + len(prefill.runs) == 4 + 12)
        assert len(decode.runs) >= 3
        assert len(prefill.runs) - 4 >= 3
        decode.script.may_step.set()
        prefill.script.may_step.set()
        await asyncio.gather(*burst)
        await running.gateway.wait_idle()
        assert_nothing_left(running)
