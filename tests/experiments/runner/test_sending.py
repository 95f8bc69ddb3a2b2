"""What is sent when: an open loop never waits, a closed one always does, and whatever happens is a row."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from moonshard.experiments.runner.asking import ABANDONED
from moonshard.experiments.runner.points import ClientOptions
from moonshard.experiments.runner.schema import CLIENT_REQUESTS, CLIENT_TOKENS
from moonshard.experiments.runner.sending import Sender
from moonshard.experiments.runner.trial import offered_per_s
from moonshard.experiments.workload.fixed import fixed
from moonshard.experiments.workload.plan import Planned, Tokens, Workload
from moonshard.experiments.workload.sessions import sessions
from moonshard.rpc.client import AsyncClient
from tests.experiments.runner.scripted import REFUSED, Scripted, listening


@pytest.fixture
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture
async def client(scripted: Scripted) -> AsyncIterator[AsyncClient]:
    async with listening(scripted) as address, AsyncClient(address) as client:
        yield client


def sender(client: AsyncClient, workload: Workload, **options) -> Sender:
    return Sender(client, workload, ClientOptions(**options), "x-")


async def test_an_open_loop_sends_everything_before_anything_is_answered(client: AsyncClient, scripted: Scripted):
    workload = fixed(prompt_tokens=4, output_tokens=3, num_requests=20, vocab_size=50, rate_per_s=400.0)
    sending = sender(client, workload)
    scripted.awaited = 20
    async with asyncio.TaskGroup() as group:
        group.create_task(sending.run())
        await scripted.all_came.wait()
        assert (sending.num_sent, len(sending.asked), scripted.most) == (20, 0, 20)
        scripted.opened.set()
    assert sorted(one.request_index for one in sending.asked) == list(range(20))
    for one in sending.asked:
        planned = workload.requests[one.request_index]
        begun_ns = one.intended_ns - round((planned.at_s or 0.0) * 1e9)
        assert begun_ns == pytest.approx(sending.asked[0].intended_ns - (first_at_s(sending) * 1e9), abs=2)
        assert one.late_ns > -1_000_000
        assert len(one.arrivals_ns) == 3
        assert one.sent_ns < one.arrivals_ns[0] <= one.arrivals_ns[-1] <= one.ended_ns


def first_at_s(sending: Sender) -> float:
    return sending.asked[0].planned.at_s or 0.0


async def test_late_is_what_was_sent_later_than_allowed(client: AsyncClient, scripted: Scripted):
    """Requests of one time cannot all be sent at it: with a bound of a nanosecond all are late, with a day's none."""
    scripted.opened.set()
    at_once = Workload(requests=[Planned(prompt=Tokens((1,)), max_tokens=1, at_s=0.0) for _ in range(5)])
    for late_ms, expected in ((1e-6, 5), (864e5, 0)):
        sending = sender(client, at_once, late_ms=late_ms)
        await sending.run()
        assert sending.num_late == expected


async def test_closed_clients_wait_for_their_answers(client: AsyncClient, scripted: Scripted):
    scripted.opened.set()
    sending = sender(client, fixed(prompt_tokens=4, output_tokens=2, num_requests=12, vocab_size=50, num_clients=3))
    await sending.run()
    by_index = {one.request_index: one for one in sending.asked}
    assert len(by_index) == 12
    assert scripted.most <= 3
    for index in range(3, 12):
        assert by_index[index].intended_ns == by_index[index - 3].ended_ns <= by_index[index].sent_ns


async def test_turns_come_in_order_after_their_thought_and_name_their_session(client: AsyncClient, scripted: Scripted):
    scripted.opened.set()
    workload = sessions([[[1], [1, 2]], [[3], [3, 4]]], max_tokens=1, num_clients=2, mean_think_s=0.01)
    sending = sender(client, workload, names_sessions=True)
    await sending.run()
    by_index = {one.request_index: one for one in sending.asked}
    for before, after in ((0, 1), (2, 3)):
        pause_ns = by_index[after].intended_ns - by_index[before].ended_ns
        assert pause_ns == round(workload.requests[after].pause_s * 1e9)
    assert sorted(scripted.sessions) == ["session 0", "session 0", "session 1", "session 1"]


async def test_a_refused_request_is_a_row_and_its_followers_are_sent(client: AsyncClient, scripted: Scripted):
    scripted.opened.set()
    prompts = [Tokens((1,) * n) for n in (2, REFUSED, 3)]
    requests = [
        Planned(prompt=prompt, max_tokens=2, at_s=None if index else 0.0, after=index - 1 if index else None)
        for index, prompt in enumerate(prompts)
    ]
    sending = sender(client, Workload(requests=requests))
    await sending.run()
    assert [one.outcome for one in sending.asked] == ["completed", "resource_exhausted", "completed"]
    assert (sending.num_failed, sending.asked[1].error, sending.asked[1].arrivals_ns) == (1, "no room", ())
    for one in sending.asked:
        assert one.row().keys() == {column.name for column in CLIENT_REQUESTS.columns}
        assert all(row.keys() == {column.name for column in CLIENT_TOKENS.columns} for row in one.token_rows())


async def test_stopping_sends_nothing_more_and_abandons_what_never_ends(
    client: AsyncClient, scripted: Scripted, monkeypatch
):
    monkeypatch.setattr("moonshard.experiments.runner.sending.GRACE_S", 0.01)
    requests = [Planned(prompt=Tokens((1,)), max_tokens=1, at_s=at_s) for at_s in (0.0, 0.0, 3600.0)]
    requests.append(Planned(prompt=Tokens((1,)), max_tokens=1, after=0))
    sending = sender(client, Workload(requests=requests))
    scripted.awaited = 2
    async with asyncio.TaskGroup() as group:
        group.create_task(sending.run())
        await scripted.all_came.wait()
        await sending.stop()
    assert [one.outcome for one in sending.asked] == [ABANDONED] * 2
    assert sending.num_sent == len(scripted.came) == 2


async def test_a_closed_loop_that_is_cancelled_abandons_its_requests_without_a_complaint(
    client: AsyncClient, scripted: Scripted
):
    """As by Ctrl-C: whoever waits for them is not sent, into a group that takes nothing more."""
    sending = sender(client, fixed(prompt_tokens=4, output_tokens=2, num_requests=12, vocab_size=50, num_clients=3))
    scripted.awaited = 3
    running = asyncio.create_task(sending.run())
    await scripted.all_came.wait()
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    assert [one.outcome for one in sending.asked] == [ABANDONED] * 3


def test_what_is_offered_is_by_the_workload_and_not_by_what_became_of_it():
    steady = fixed(prompt_tokens=1, output_tokens=1, num_requests=11, vocab_size=9, rate_per_s=5.0, interval_cv=0.0)
    assert offered_per_s(steady) == pytest.approx(5.0)
    assert offered_per_s(fixed(prompt_tokens=1, output_tokens=1, num_requests=4, vocab_size=9)) is None
    assert offered_per_s(Workload(requests=steady.requests[:1])) is None
