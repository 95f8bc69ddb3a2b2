"""A request outlives the workers that it loses, and its client cannot tell."""

import asyncio
import time
from typing import get_args

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moonshard.models.tokenizers.tokenizer import load_tokenizer
from moonshard.rpc import link_pb2
from moonshard.rpc.client import AsyncClient
from moonshard.rpc.status import InternalError, InvalidArgument, Overloaded, Unavailable
from moonshard.serving.gateway.process import RunningGateway
from tests.serving.gateway.conftest import FIXTURE
from tests.serving.gateway.fake_worker import FakeWorker, expected_tokens
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

TOKENIZER = load_tokenizer(FIXTURE)
EXPECTED = tuple(expected_tokens(PROMPT, NUM_TOKENS, choice) for choice in range(3))
CORRUPT = link_pb2.Failed(code=15, message="bad sum", cause=link_pb2.HANDOFF_CAUSE_CORRUPT)
FORMS: tuple[Form, ...] = get_args(Form.__value__)
KILLS = (
    ("decode", "target"),
    ("prefill", "chunk 0"),
    ("prefill", "chunk 1"),
    ("decode", "land 0"),
    ("prefill", "first_tokens"),
    ("prefill", "last_chunk"),
    ("decode", "start"),
    ("decode", "step 0"),
    ("decode", "step 3"),
    ("decode", f"step {NUM_TOKENS - 2}"),
)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("role", "point"), KILLS)
async def test_no_token_is_missing_or_doubled_whichever_worker_dies_where(form: Form, role: str, point: str):
    workers = [prefill_worker(1), prefill_worker(2), decode_worker(1), decode_worker(2)]
    candidates = [worker for worker in workers if worker.welcome.role == role]
    for worker in candidates:
        worker.script.points.hold(point)
    async with fleet(*workers) as running:
        asking = asyncio.create_task(ask(running, form, logprobs=1))
        victim = await first_to_reach(point, candidates)
        victim.die()
        answer = await asking
        assert answer.tokens == EXPECTED[:2]
        assert answer.num_logprobs == (NUM_TOKENS, NUM_TOKENS)
        assert answer.num_billed == 2 * NUM_TOKENS
        runs = [run for worker in workers for run in worker.runs]
        assert len({run.sampling.seed for run in runs}) == 1
        await running.gateway.wait_idle()
        assert_nothing_left(running)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("point", ["step 0", "step 3", f"step {NUM_TOKENS - 1}"])
async def test_an_aggregated_worker_dies_and_another_goes_on(form: Form, point: str):
    workers = [FakeWorker(epoch=b"1" * 16), FakeWorker(epoch=b"2" * 16)]
    for worker in workers:
        worker.script.points.hold(point)
    async with fleet(*workers) as running:
        asking = asyncio.create_task(ask(running, form))
        (await first_to_reach(point, workers)).die()
        answer = await asking
        assert answer.tokens == EXPECTED[:2]
        await running.gateway.wait_idle()
        assert_nothing_left(running)


async def test_decode_needs_no_prefill_worker_that_has_done_its_part():
    prefill, decode = prefill_worker(), decode_worker()
    decode.script.points.hold("step 0")
    async with fleet(prefill, decode) as running:
        asking = asyncio.create_task(ask(running, "grpc"))
        await decode.script.points.reached("step 0")
        prefill.die()
        while running.gateway.pool.knowledge.dispatcher.fleet.has_prefill:
            await running.gateway.pool.wait_changed(1)
        decode.script.points.release()
        assert (await asking).tokens == EXPECTED[:2]
        assert decode.runs == []


async def until_arrived(running: RunningGateway, num_tokens: int) -> None:
    """Waits until that many tokens have come from the workers to the gateway."""
    async with httpx.AsyncClient(base_url=running.http, trust_env=False) as http:
        while True:
            families = text_string_to_metric_families((await http.get("/metrics")).text)
            samples = (sample for family in families for sample in family.samples)
            if sum(s.value for s in samples if s.name == "vllm:generation_tokens_total") == num_tokens:
                return


async def test_a_choice_that_ended_is_not_begun_again():
    """Choice 1 ends by a stop token at its third; then the worker dies."""
    stop = EXPECTED[1][2]
    others = (EXPECTED[0], EXPECTED[2])
    assert not any(stop in tokens for tokens in others)
    workers = [prefill_worker(), decode_worker(1), decode_worker(2)]
    for worker in workers[1:]:
        worker.script.points.hold("step 4")
    async with fleet(*workers) as running:
        asking = asyncio.create_task(ask(running, "http stream", n=3, stop_token_ids=[stop]))
        victim = await first_to_reach("step 4", workers[1:])
        await until_arrived(running, 5 + 3 + 5)  # what it said may still be on its way
        victim.die()
        answer = await asking
        assert answer.tokens == (EXPECTED[0], EXPECTED[1][:3], EXPECTED[2])
        survivor = next(worker for worker in workers[1:] if worker is not victim)
        (rest,) = survivor.runs
        assert {resumed.choice: list(resumed.token_ids) for resumed in rest.resumed} == {
            0: EXPECTED[0][:5],
            2: EXPECTED[2][:5],
        }


@pytest.mark.parametrize("form", FORMS)
async def test_a_stop_string_is_found_across_the_loss_of_a_worker(form: Form):
    assert TOKENIZER is not None
    says = [TOKENIZER.encode(letter)[0] for letter in "abcdefgh"]
    workers = [prefill_worker(), decode_worker(1), decode_worker(2)]
    for worker in workers:
        worker.script.next_token = lambda _choice, _last, position: says[position - len(PROMPT)]
    for worker in workers[1:]:
        worker.script.points.hold("step 2")  # it has said "abc", of which "c" is held back
    async with fleet(*workers) as running:
        asking = asyncio.create_task(ask(running, form, n=1, stop=["cde"]))
        (await first_to_reach("step 2", workers[1:])).die()
        answer = await asking
        assert answer.texts == ("ab",)
        assert answer.tokens == (says[:5],)
        assert answer.num_billed == 5


@pytest.mark.parametrize(
    "cause",
    [link_pb2.HANDOFF_CAUSE_CORRUPT, link_pb2.HANDOFF_CAUSE_WRITE_FAILED, link_pb2.HANDOFF_CAUSE_LEASE],
)
async def test_a_handoff_that_fails_twice_leaves_prefill_to_the_decode_worker(cause: link_pb2.HandoffCause):
    prefill, decode = prefill_worker(), decode_worker()
    failed = link_pb2.Failed(code=15, message="it failed", cause=cause)
    prefill.script.points.failures["chunk 1"] = failed
    async with fleet(prefill, decode) as running:
        answer = await ask(running, "grpc")
        assert answer.tokens == EXPECTED[:2]
        assert len(prefill.runs) == 2
        (own,) = decode.runs
        assert not own.resumed
        await running.gateway.wait_idle()
        assert_nothing_left(running)


async def test_kv_that_arrived_corrupt_after_the_first_token_costs_no_token():
    prefill, decode = prefill_worker(), decode_worker()
    decode.script.points.failures["start"] = CORRUPT
    async with fleet(prefill, decode) as running:
        answer = await ask(running, "http stream")
        assert answer.tokens == EXPECTED[:2]
        (rest,) = decode.runs
        assert [list(resumed.token_ids) for resumed in rest.resumed] == [tokens[:1] for tokens in EXPECTED[:2]]


async def test_a_handoff_that_does_not_start_in_time_is_begun_anew_and_one_that_has_started_is_left_alone():
    workers = [decode_worker(1), decode_worker(2)]
    for worker in workers:
        worker.script.points.hold("step 3")
    async with fleet(prefill_worker(), *workers, lease_s=2.0) as running:
        first = asyncio.create_task(ask(running, "grpc"))
        started = await first_to_reach("step 3", workers)
        stuck = next(worker for worker in workers if worker is not started)
        stuck.script.points.hold("target")
        second = asyncio.create_task(ask(running, "grpc"))
        await stuck.script.points.reached("target")
        await until(lambda: len(started.starts) == 2)  # a whole lease later
        started.script.points.release()
        assert (await first).tokens == (await second).tokens == EXPECTED[:2]
        assert started.runs == stuck.runs == []
        assert len(started.reserves) == 2


async def test_attempts_are_not_without_end():
    prefill, decode = prefill_worker(), decode_worker()
    prefill.script.points.failures["chunk 1"] = CORRUPT
    async with fleet(prefill, decode, max_attempts=2) as running, AsyncClient(running.grpc) as client:
        with pytest.raises(Unavailable) as caught:
            await client.generate(PROMPT)
        assert caught.value.retry_after_s
        assert len(prefill.runs) == 2
        assert decode.runs == []


async def test_a_request_that_lost_its_worker_waits_for_another_to_come():
    decode = decode_worker()
    decode.script.points.hold("step 3")
    async with fleet(decode, failover_wait_s=20) as running:
        asking = asyncio.create_task(ask(running, "http stream"))
        await decode.script.points.reached("step 3")
        decode.die()
        await running.gateway.pool.wait_not_ready()
        decode.script.points.release()
        decode.revive(epoch=b"n" * 16)
        assert (await asking).tokens == EXPECTED[:2]
        assert [len(run.resumed) for run in decode.runs] == [0, 2]


@pytest.mark.parametrize("point", ["step 0", "step 3"])
async def test_without_any_worker_left_the_error_has_a_type_and_comes_soon(point: str):
    workers = [prefill_worker(), decode_worker()]
    workers[1].script.points.hold(point)
    async with fleet(*workers, failover_wait_s=0.3) as running, AsyncClient(running.grpc) as client:
        calling = asyncio.create_task(client.generate(PROMPT))
        await workers[1].script.points.reached(point)
        began_s = time.perf_counter()
        workers[1].die()
        with pytest.raises(Unavailable) as caught:
            await calling
        assert time.perf_counter() - began_s >= 0.3
        assert caught.value.retry_after_s
        await running.gateway.wait_idle()
        assert_nothing_left(running)


async def test_what_is_the_requests_own_fault_is_not_tried_again():
    workers = [decode_worker(1), decode_worker(2)]
    cases = (
        (link_pb2.Failed(code=3, message="too long", field="prompt"), InvalidArgument),
        (link_pb2.Failed(code=8, message="the queue is full", retry_after_s=2), Overloaded),
        (link_pb2.Failed(code=13, message="the device failed"), InternalError),
    )
    async with fleet(*workers) as running, AsyncClient(running.grpc) as client:
        for number, (failure, kind) in enumerate(cases):
            for worker in workers:
                worker.script.failure = failure
            with pytest.raises(kind):
                await client.generate(PROMPT)
            assert sum(len(worker.runs) for worker in workers) == number + 1


async def test_a_worker_that_turns_requests_away_is_not_asked_again_where_there_is_another():
    workers = [decode_worker(1), decode_worker(2)]
    workers[0].script.failure = link_pb2.Failed(code=14, message="draining")
    async with fleet(*workers) as running:
        for _ in range(4):
            assert (await ask(running, "grpc")).tokens == EXPECTED[:2]
        assert len(workers[1].runs) == 4


async def test_a_gateway_that_shuts_down_tries_nothing_again():
    decode = decode_worker()
    decode.script.points.hold("step 1")
    async with fleet(decode) as running, AsyncClient(running.grpc) as client:
        calling = asyncio.create_task(client.generate(PROMPT))
        await decode.script.points.reached("step 1")
        running.gateway.is_draining = True
        running.gateway.pool.fail_all(Unavailable("the server is shutting down"))
        with pytest.raises(Unavailable, match="shutting down"):
            await calling
        assert len(decode.runs) == 1
