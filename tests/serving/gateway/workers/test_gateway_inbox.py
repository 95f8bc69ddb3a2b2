"""All outputs that wait for a request are taken and sent to its client together; a failure follows them."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc import link_pb2
from moonshard.rpc.status import RequestError, Unavailable
from moonshard.serving.gateway.request import GenerationRequest, TokenPrompt
from moonshard.serving.gateway.workers.inbox import Arrival, Inbox
from tests.serving.gateway.fake_worker import FakeWorker, expected_tokens
from tests.serving.gateway.workers.fleet import PROMPT, fleet, until

NUM_TOKENS = 20


def arrival(number: int) -> Arrival:
    return Arrival(number, link_pb2.SequenceOutput(token_ids=[number]))


@given(st.lists(st.sampled_from(["arrival", "error", "take"])))
def test_everything_is_taken_once_and_in_order_and_an_error_alone(steps: list[str]):
    inbox = Inbox()
    put: list[Arrival | RequestError] = []
    taken: list[Arrival | RequestError] = []

    def take() -> None:
        try:
            taken.extend(inbox.take_nowait())
        except RequestError as error:
            taken.append(error)

    for number, step in enumerate(steps):
        if step == "take":
            take()
        else:
            put.append(arrival(number) if step == "arrival" else Unavailable(str(number)))
            inbox.put_nowait(put[-1])
    while not inbox.empty():
        take()
    assert taken == put


async def test_who_waits_is_woken_by_what_comes_and_by_nothing_else():
    inbox = Inbox()
    waiting = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    inbox.put_nowait(arrival(1))
    inbox.put_nowait(arrival(2))
    assert await waiting == [arrival(1), arrival(2)]
    inbox.put_nowait(Unavailable("gone"))
    with pytest.raises(Unavailable):
        await inbox.take()


async def test_a_reader_who_gives_up_loses_nothing():
    inbox = Inbox()
    waiting = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    inbox.put_nowait(arrival(1))
    assert await inbox.take() == [arrival(1)]


@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_that_reads_late_gets_what_it_missed_in_one_delta(n: int):
    worker = FakeWorker()
    async with fleet(worker) as running:
        asked = GenerationRequest(
            request_id="r", received_ns=1, prompt=TokenPrompt(PROMPT), max_tokens=NUM_TOKENS, ignore_eos=True, n=n
        )
        events = running.gateway.generate(asked)
        worker.script.points.hold("step 1")
        first = [await _next_delta(events) for _ in range(n)]
        worker.script.points.release()
        await until(lambda: len(worker.finished) == 1)
        await worker.say(link_pb2.WorkerMessage(load=link_pb2.WorkerLoad(num_compilations=77)))
        (link,) = running.gateway.pool.links
        await until(lambda: link.last_load.num_compilations == 77)  # so that all before it is here too
        rest = [event async for event in events]
        answers = [expected_tokens(PROMPT, NUM_TOKENS, choice) for choice in range(n)]
        texts = [await running.gateway.model.detokenize(answer, NUM_TOKENS, field="ids") for answer in answers]
    deltas = [event for event in rest if isinstance(event, pb.Delta)]
    assert len(deltas) == n
    for choice in range(n):
        told = [delta for delta in (*first, *deltas) if delta.choice == choice]
        assert [token for delta in told for token in delta.token_ids] == answers[choice]
        assert "".join(delta.text for delta in told) == texts[choice] != ""
        assert [delta.finish_reason for delta in told] == [0, pb.FINISH_REASON_LENGTH]
    (summary,) = (event for event in rest if isinstance(event, pb.Summary))
    assert summary.usage.completion_tokens == n * NUM_TOKENS


async def _next_delta(events) -> pb.Delta:
    return await anext(event async for event in events if isinstance(event, pb.Delta))
