"""A request that is prefilled by one worker and decoded by another, when all is well, and which workers it goes to."""

import asyncio
import time
from collections.abc import AsyncIterator

import httpx
import pytest

from moonshard.rpc import link_pb2
from moonshard.rpc.client import AsyncClient
from moonshard.rpc.status import InvalidArgument, Overloaded
from moonshard.serving.gateway.process import RunningGateway
from tests.serving.gateway.fake_worker import FakeWorker, expected_tokens, overloaded
from tests.serving.gateway.workers.fleet import (
    NUM_TOKENS,
    PROMPT,
    Form,
    ask,
    assert_nothing_left,
    decode_worker,
    first_to_reach,
    fleet,
    prefill_worker,
    until,
)

SESSION = (("x-session-affinity", "a session"),)
EXPECTED = tuple(expected_tokens(PROMPT, NUM_TOKENS, choice) for choice in range(3))


@pytest.fixture
def prefill() -> FakeWorker:
    return prefill_worker()


@pytest.fixture
def decode() -> FakeWorker:
    return decode_worker()


@pytest.fixture
async def running(prefill: FakeWorker, decode: FakeWorker) -> AsyncIterator[RunningGateway]:
    async with fleet(prefill, decode) as running:
        yield running


@pytest.mark.parametrize("form", ["http stream", "http whole", "grpc"])
async def test_the_tokens_are_those_of_one_worker(
    running: RunningGateway, prefill: FakeWorker, decode: FakeWorker, form: Form
):
    answer = await ask(running, form, n=3, logprobs=2)
    assert answer.tokens == EXPECTED
    assert answer.num_logprobs == (NUM_TOKENS,) * 3
    assert answer.num_billed == 3 * NUM_TOKENS
    (run,), (reserve,), (start,) = prefill.runs, decode.reserves, decode.starts
    assert run.request_id == reserve.run.request_id == start.handoff
    assert run.endpoint == decode.welcome.endpoint
    assert reserve.writer_epoch == prefill.welcome.epoch
    assert reserve.lease_s == 60.0
    assert list(start.token_ids) == [tokens[0] for tokens in EXPECTED]
    assert decode.runs == []
    await running.gateway.wait_idle()
    assert_nothing_left(running)
    assert prefill.cancelled == decode.cancelled == []


async def test_the_first_token_waits_neither_for_the_transfer_nor_for_decode(
    running: RunningGateway, prefill: FakeWorker
):
    prefill.script.points.hold("last_chunk")
    async with AsyncClient(running.grpc) as client, client.stream(PROMPT, max_tokens=NUM_TOKENS) as stream:
        deltas = aiter(stream)
        assert list((await anext(deltas)).token_ids) == EXPECTED[0][:1]
        prefill.script.points.release()
        assert [token async for delta in deltas for token in delta.token_ids] == EXPECTED[0][1:]


async def test_first_tokens_that_come_after_the_last_chunk_change_nothing(running: RunningGateway, prefill: FakeWorker):
    prefill.script.are_first_tokens_late = True
    assert (await ask(running, "grpc")).tokens == EXPECTED[:2]


async def test_a_request_that_its_first_token_ends_frees_the_decode_worker(
    running: RunningGateway, prefill: FakeWorker, decode: FakeWorker
):
    prefill.script.points.hold("last_chunk")
    answer = await ask(running, "grpc", max_tokens=1)
    assert answer.tokens == (EXPECTED[0][:1], EXPECTED[1][:1])
    await decode.cancel_seen.wait()
    assert decode.starts == []
    await running.gateway.wait_idle()
    assert_nothing_left(running)


async def test_a_choice_that_its_first_token_ends_is_not_decoded(running: RunningGateway, decode: FakeWorker):
    stop = EXPECTED[1][0]
    assert stop not in EXPECTED[0] + EXPECTED[2]
    answer = await ask(running, "http stream", n=3, stop_token_ids=[stop])
    assert answer.tokens == (EXPECTED[0], [stop], EXPECTED[2])


async def test_each_worker_is_held_only_while_it_works(running: RunningGateway, decode: FakeWorker):
    pool = running.gateway.pool
    of_prefill, of_decode = (link.address for link in pool.links)
    decode.script.points.hold("target", "step 0")
    asking = asyncio.create_task(ask(running, "grpc"))
    await decode.script.points.reached("target")
    whole = len(PROMPT) + 2 * NUM_TOKENS
    assert (pool.in_flight_tokens(of_prefill), pool.in_flight_tokens(of_decode)) == (len(PROMPT), whole)
    decode.script.points.release("target")
    await decode.script.points.reached("step 0")
    assert (pool.in_flight_tokens(of_prefill), pool.in_flight_tokens(of_decode)) == (0, whole)
    decode.script.points.release()
    await asking
    assert (pool.in_flight_tokens(of_prefill), pool.in_flight_tokens(of_decode)) == (0, 0)


async def test_timing_tells_of_the_handoff_and_its_phases_still_add_up(
    running: RunningGateway, prefill: FakeWorker, decode: FakeWorker
):
    decode.script.reserve_queue_ms = 0.015
    async with AsyncClient(running.grpc) as client:
        decode.script.points.hold("step 0")
        calling = asyncio.create_task(client.generate(PROMPT, max_tokens=NUM_TOKENS))
        await decode.script.points.reached("step 0")
        decode.script.points.release()
        timing = (await calling).timing
        only_one = (await client.generate(PROMPT, max_tokens=1)).timing
    assert sum(timing.phases().values()) == pytest.approx(timing.e2e_ms)
    assert 0 < timing.handoff_gap_ms <= timing.decode_ms
    assert (timing.transfer_ms, timing.exposed_transfer_ms) == (0.05, 0.01)
    assert (timing.land_ms, timing.join_ms) == (0.03, 0.04)
    assert (timing.worker_queue_ms, timing.worker_prefill_ms, timing.worker_decode_ms) == (0.01, 0.02, 0.5)
    assert (timing.decode_queue_ms, timing.lost_ms) == (0.015, 0)
    named_ms = timing.decode_queue_ms + timing.worker_queue_ms + timing.worker_prefill_ms + timing.wire_ms
    assert named_ms == pytest.approx(timing.first_token_ms)
    assert (timing.num_retries, only_one.handoff_gap_ms, only_one.transfer_ms) == (0, 0, 0)


async def test_a_request_that_went_on_elsewhere_says_how_often_and_what_it_lost_there(decode: FakeWorker):
    prefill = prefill_worker()
    prefill.script.points.failures["first_tokens"] = link_pb2.Failed(cause=link_pb2.HANDOFF_CAUSE_WRITE_FAILED)
    prefill.script.points.hold("first_tokens")
    decode.script.reserve_queue_ms = 1e6  # of the attempts that are lost
    async with fleet(prefill, decode) as running, AsyncClient(running.grpc) as client:
        calling = asyncio.create_task(client.generate(PROMPT, max_tokens=NUM_TOKENS))
        await prefill.script.points.reached("first_tokens")
        held_s = time.perf_counter()
        await asyncio.sleep(0.05)
        held_ms = (time.perf_counter() - held_s) * 1e3
        prefill.script.points.release()
        timing = (await calling).timing
    assert timing.num_retries == 2  # then the decode worker prefills
    assert held_ms <= timing.lost_ms <= timing.first_token_ms
    assert timing.decode_queue_ms == 0
    named_ms = timing.lost_ms + timing.worker_queue_ms + timing.worker_prefill_ms + timing.wire_ms
    assert named_ms == pytest.approx(timing.first_token_ms)
    assert timing.wire_ms >= -1
    assert sum(timing.phases().values()) == pytest.approx(timing.e2e_ms)


async def test_cached_tokens_are_those_that_the_worker_found_that_computed_the_prompt(
    running: RunningGateway, prefill: FakeWorker, decode: FakeWorker
):
    async with AsyncClient(running.grpc) as client:
        prefill.script.cached_tokens, decode.script.cached_tokens = 16, 32
        prefill.script.cached_by_tier, decode.script.cached_by_tier = {"store": 16}, {"host": 32}
        usage = (await client.generate(PROMPT, max_tokens=4)).usage
        assert (usage.cached_tokens, usage.cached_by_tier) == (16, {"store": 16})
        prefill.script.cached_tokens, decode.script.cached_tokens = 32, 0
        assert (await client.generate(PROMPT, max_tokens=4)).usage.cached_tokens == 32


async def test_metrics_tell_what_moved_and_what_was_tried_again():
    prefill, decode = prefill_worker(), decode_worker()
    async with fleet(prefill, decode, local_prefill_max_tokens=20) as running:
        await ask(running, "grpc")
        await ask(running, "http whole", prompt=PROMPT[:20])
        decode.script.points.failures["start"] = link_pb2.Failed(cause=link_pb2.HANDOFF_CAUSE_CORRUPT)
        await ask(running, "grpc")
        async with httpx.AsyncClient(base_url=running.http, trust_env=False) as client:
            text = (await client.get("/metrics")).text
    labels = 'engine="1",model_name="kimi"'
    assert f"moonshard_request_handoffs_total{{{labels}}} 2.0" in text
    assert f"moonshard_local_prefills_total{{{labels}}} 1.0" in text
    assert f'moonshard_request_retries_total{{cause="corrupt",{labels}}} 1.0' in text
    assert f"moonshard_handoff_gap_seconds_count{{{labels}}} 2.0" in text
    assert f"moonshard_exposed_transfer_seconds_count{{{labels}}} 2.0" in text
    by_source = 'vllm:prompt_tokens_by_source_total{engine="1",model_name="kimi",source='
    assert f'{by_source}"external_kv_transfer"}} {2 * len(PROMPT)}.0' in text
    assert f'{by_source}"local_compute"}} 20.0' in text


# ---- which workers


@pytest.mark.parametrize(("num_prompt", "is_local"), [(20, True), (21, False)])
async def test_a_short_prompt_is_prefilled_where_it_is_decoded(num_prompt: int, is_local: bool):
    prefill, decode = prefill_worker(), decode_worker()
    async with fleet(prefill, decode, local_prefill_max_tokens=20) as running, AsyncClient(running.grpc) as client:
        completion = await client.generate(PROMPT[:num_prompt], max_tokens=4)
        assert list(completion.choices[0].token_ids) == expected_tokens(PROMPT[:num_prompt], 4)
        assert (len(decode.runs), len(prefill.runs)) == ((1, 0) if is_local else (0, 1))


async def test_an_aggregated_worker_does_both_though_a_prefill_worker_is_there():
    prefill, both = prefill_worker(), FakeWorker()
    async with fleet(prefill, both) as running:
        assert (await ask(running, "grpc")).tokens == EXPECTED[:2]
        assert (len(prefill.runs), len(both.runs)) == (0, 1)


async def test_without_a_prefill_worker_the_decode_worker_prefills(decode: FakeWorker):
    async with fleet(decode) as running:
        assert (await ask(running, "grpc")).tokens == EXPECTED[:2]
        assert len(decode.runs) == 1


async def test_a_full_decode_worker_is_passed_over():
    full, free = decode_worker(1), decode_worker(2)
    full.script.reserve_failure = overloaded()
    async with fleet(prefill_worker(), full, free) as running:
        for _ in range(3):
            assert (await ask(running, "grpc")).tokens == EXPECTED[:2]
        assert len(free.reserves) == 3
        await running.gateway.wait_idle()
        assert_nothing_left(running)


async def test_a_session_is_not_where_its_leg_was_never_sent():
    prefill, decode = [prefill_worker(1), prefill_worker(2)], decode_worker()
    decode.script.reserve_failure = overloaded()
    told = []
    async with fleet(*prefill, decode) as running, AsyncClient(running.grpc) as client:
        with pytest.raises(Overloaded):
            await client.generate(PROMPT, metadata=SESSION)
        decode.script.reserve_failure = None
        for _ in range(2):
            async with client.stream(PROMPT, max_tokens=2, metadata=SESSION) as stream:
                told.append((await stream.headers())["x-moonshard-affinity"])
                assert [delta async for delta in stream]
        await running.gateway.wait_idle()
        assert_nothing_left(running)
    assert told == ["miss", "hit"]
    assert sorted(len(worker.runs) for worker in prefill) == [0, 2]


async def test_when_all_decode_workers_are_full_the_client_is_told_when_to_come_back():
    prefill, workers = prefill_worker(), [decode_worker(1), decode_worker(2)]
    for worker in workers:
        worker.script.reserve_failure = overloaded(retry_after_s=7)
    async with fleet(prefill, *workers) as running, AsyncClient(running.grpc) as client:
        async with httpx.AsyncClient(base_url=running.http, trust_env=False) as http:
            body = {"model": "kimi", "prompt": PROMPT, "stream": True}
            response = await http.post("/v1/completions", json=body)
        assert (response.status_code, response.headers["retry-after"]) == (429, "7")
        assert [len(worker.reserves) for worker in workers] == [1, 1]
        with pytest.raises(Overloaded) as caught:
            await client.generate(PROMPT)
        assert caught.value.retry_after_s == 7
        assert prefill.runs == []
        await running.gateway.wait_idle()
        assert_nothing_left(running)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_a_worker_says_of_the_request_itself_reaches_the_client(
    running: RunningGateway, prefill: FakeWorker, decode: FakeWorker, role: str
):
    refusal = link_pb2.Failed(code=3, message="does not fit", field="prompt_tokens")
    if role == "prefill":
        prefill.script.failure = refusal
    else:
        decode.script.reserve_failure = refusal
    async with AsyncClient(running.grpc) as client:
        with pytest.raises(InvalidArgument, match="does not fit"):
            await client.generate(PROMPT)
    assert len(decode.reserves) == 1
    await running.gateway.wait_idle()
    assert_nothing_left(running)


async def test_a_prefill_worker_that_takes_nothing_now_is_passed_over():
    closing, other, decode = prefill_worker(1), prefill_worker(2), decode_worker()
    closing.script.failure = link_pb2.Failed(code=14, message="draining")
    async with fleet(closing, other, decode) as running:
        for _ in range(3):
            assert (await ask(running, "grpc")).tokens == EXPECTED[:2]
        assert len(other.runs) == 3


async def test_drained_reaches_the_decode_worker_though_the_handoff_is_over(
    running: RunningGateway, prefill: FakeWorker, decode: FakeWorker
):
    prefill.script.points.hold("chunk 1")
    async with AsyncClient(running.grpc) as client:
        calling = asyncio.create_task(client.generate(PROMPT))
        await first_to_reach("chunk 1", [prefill])
        calling.cancel()
    (handoff,) = (reserve.run.request_id for reserve in decode.reserves)
    await until(lambda: bool(decode.drained))
    assert [drained.handoff for drained in decode.drained] == [handoff]
