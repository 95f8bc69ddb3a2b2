"""Which workers attempts go to; and that they leave nothing behind, in whatever order events come."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonshard.kv.prefix import block_names, root_name
from moonshard.serving.control.dispatch.attempt import Attempt
from moonshard.serving.control.dispatch.dispatcher import (
    Demand,
    Dispatcher,
    DispatchRules,
    NoRoom,
    NoWorker,
    Refusal,
    Wait,
)
from moonshard.serving.control.dispatch.prefill_place import PrefillRule
from moonshard.serving.control.dispatch.retries import LegFailure, Retries
from moonshard.serving.control.handoff.messages import Cause
from moonshard.serving.control.members.fleet import Fleet, MemberLoad
from moonshard.serving.control.routing.policies import cost
from moonshard.serving.control.routing.router import Home, Router
from moonshard.serving.control.ttft.bound import TooLate, TtftSlo
from moonshard.serving.control.ttft.forecast import LEAST_TTFT_S
from moonshard.serving.control.ttft.model import MIN_SAMPLES
from tests.serving.control.members.test_fleet import a_member

MOVES = PrefillRule(kind="static")
MAX_ATTEMPTS = 4
DECODES, PREFILLS = ("d1:1", "d2:1"), ("p1:1", "p2:1")


def a_dispatcher(
    *, prefill: PrefillRule = MOVES, ttft_slo_s: TtftSlo = None, failover_wait_s: float = 10.0
) -> Dispatcher:
    """A dispatcher without workers."""
    rules = DispatchRules(failover_wait_s=failover_wait_s, ttft_slo_s=ttft_slo_s, prefill=prefill)
    return Dispatcher(Fleet((*DECODES, *PREFILLS)), Router(), rules, cost)


def join(dispatcher: Dispatcher, addresses: Sequence[str], *, role: str | None = None, first_epoch: int = 1) -> None:
    for number, address in enumerate(addresses):
        epoch = first_epoch + (100 if address in PREFILLS else 0) + number
        kind = role or ("prefill" if address in PREFILLS else "decode")
        dispatcher.join(a_member(address, epoch=epoch, role=kind))


def in_flight(dispatcher: Dispatcher) -> list[int]:
    return [dispatcher.router.worker_tokens(address) for address in (*DECODES, *PREFILLS)]


def begun(dispatcher: Dispatcher, retries: Retries, demand: Demand, now_s: float = 0.0) -> Attempt:
    answer = dispatcher.begin(demand, retries, now_s)
    assert isinstance(answer, Attempt)
    return answer


@pytest.fixture
def retries() -> Retries:
    return Retries(max_attempts=MAX_ATTEMPTS)


@pytest.fixture
def demand() -> Demand:
    return Demand(num_prompt=40, max_new_tokens=8)


@pytest.mark.parametrize(
    ("decode_role", "has_prefill", "is_resumed", "is_moved", "is_local"),
    [
        ("decode", True, False, True, False),
        ("decode", False, False, False, True),
        ("decode", True, True, False, False),
        ("both", True, False, False, False),
    ],
)
def test_a_prompt_is_computed_elsewhere_where_its_worker_leaves_it_to_others_and_there_are_some(
    retries: Retries,
    demand: Demand,
    decode_role: str,
    has_prefill: bool,
    is_resumed: bool,
    is_moved: bool,
    is_local: bool,
):
    dispatcher = a_dispatcher()
    join(dispatcher, DECODES, role=decode_role)
    join(dispatcher, PREFILLS if has_prefill else ())
    attempt = dispatcher.begin(demand, retries, 0.0, is_resumed=is_resumed)
    assert isinstance(attempt, Attempt)
    assert (attempt.prefill is not None, attempt.is_local_prefill) == (is_moved, is_local)
    assert attempt.decode.reservation.num_tokens == 48
    assert attempt.prompt.home.worker in (PREFILLS if is_moved else DECODES)
    assert sum(in_flight(dispatcher)) == 48 + (40 if is_moved else 0)
    dispatcher.end(attempt)
    assert in_flight(dispatcher) == [0] * 4


def test_a_request_goes_to_whoever_has_not_failed_it_and_rather_there_again_than_nowhere(
    retries: Retries, demand: Demand
):
    dispatcher = a_dispatcher()
    join(dispatcher, DECODES, role="both")
    epochs = []
    for _ in range(3):
        attempt = begun(dispatcher, retries, demand)
        epochs.append(attempt.decode.epoch)
        dispatcher.end(attempt)
        assert dispatcher.failed(attempt, retries, LegFailure.WORKER_GONE)
    assert set(epochs[:2]) == {1, 2}
    assert epochs[2] in {1, 2}


def test_where_no_other_worker_is_left_but_those_without_room_the_request_is_told_so(retries: Retries, demand: Demand):
    dispatcher = a_dispatcher()
    join(dispatcher, DECODES)
    join(dispatcher, PREFILLS)
    for _ in DECODES:
        attempt = begun(dispatcher, retries, demand)
        dispatcher.end(attempt)
        assert dispatcher.failed(attempt, retries, Cause.OVERLOADED, retry_after_s=3.0)
    assert dispatcher.begin(demand, retries, 0.0) == NoRoom(3.0)


def test_after_two_prefills_that_failed_the_decode_worker_prefills(retries: Retries, demand: Demand):
    dispatcher = a_dispatcher()
    join(dispatcher, DECODES)
    join(dispatcher, PREFILLS)
    prefills = []
    for _ in range(3):
        attempt = begun(dispatcher, retries, demand)
        prefills.append(attempt.prefill and attempt.prefill.epoch)
        dispatcher.end(attempt)
        assert dispatcher.failed(attempt, retries, Cause.PREFILL_GONE)
    assert (set(prefills[:2]), prefills[2]) == ({101, 102}, None)


def test_only_a_request_that_lost_its_worker_waits_for_one_and_it_takes_the_first_that_comes(
    retries: Retries, demand: Demand
):
    dispatcher = a_dispatcher(failover_wait_s=10.0)
    assert dispatcher.begin(demand, retries, 0.0) == NoWorker()
    join(dispatcher, DECODES[:1], role="both")
    attempt = begun(dispatcher, retries, demand)
    dispatcher.leave(DECODES[0])
    dispatcher.end(attempt)
    assert dispatcher.failed(attempt, retries, LegFailure.WORKER_GONE)
    assert [dispatcher.begin(demand, retries, now_s) for now_s in (50.0, 59.0)] == [Wait(60.0), Wait(60.0)]
    join(dispatcher, DECODES[1:], role="both")
    attempt = begun(dispatcher, retries, demand, 59.5)
    dispatcher.leave(DECODES[1])
    dispatcher.end(attempt)
    assert dispatcher.failed(attempt, retries, LegFailure.WORKER_GONE)
    assert [dispatcher.begin(demand, retries, now_s) for now_s in (80.0, 90.0)] == [Wait(90.0), NoWorker()]


def teach(dispatcher: Dispatcher, *, alone_s: float, queued_token_s: float) -> None:
    """Makes the router believe that every token queued before a prompt took that long."""
    for queued in range(MIN_SAMPLES):
        dispatcher.forecast.model.observe(
            DECODES[0], own_tokens=40, queued_tokens=queued, ttft_s=alone_s + queued * queued_token_s
        )


def test_whoever_would_wait_too_long_is_refused_and_nothing_is_held_for_it(retries: Retries, demand: Demand):
    dispatcher = a_dispatcher(ttft_slo_s=1.0)
    join(dispatcher, DECODES[:1], role="both")
    teach(dispatcher, alone_s=0.9, queued_token_s=0.1)
    first = begun(dispatcher, retries, demand)
    assert in_flight(dispatcher)[0] == 48
    late = dispatcher.begin(demand, Retries(max_attempts=2), 0.0)
    assert isinstance(late, TooLate)
    assert late.predicted_s == pytest.approx(0.9 + 48 * 0.1)
    assert (late.limit_s, late.retry_after_s) == (1.0, pytest.approx(late.predicted_s - 1.0))
    assert in_flight(dispatcher)[0] == 48
    dispatcher.end(first)
    dispatcher.end(begun(dispatcher, Retries(max_attempts=2), demand))


def test_what_was_begun_before_is_not_refused_for_its_wait(retries: Retries, demand: Demand):
    dispatcher = a_dispatcher(ttft_slo_s=1.0)
    join(dispatcher, DECODES[:1], role="both")
    lost = begun(dispatcher, retries, demand)
    dispatcher.end(lost)
    assert dispatcher.failed(lost, retries, LegFailure.WORKER_GONE)
    teach(dispatcher, alone_s=0.9, queued_token_s=0.1)
    dispatcher.router.report(Home(DECODES[0], 0), 1000)
    assert isinstance(dispatcher.begin(demand, retries, 0.0), Attempt)
    assert isinstance(dispatcher.begin(demand, Retries(max_attempts=2), 0.0), TooLate)


def test_each_leg_of_an_affinity_key_has_a_pin_of_its_own_and_what_came_to_nothing_leaves_none(retries: Retries):
    demand = Demand(num_prompt=40, max_new_tokens=8, affinity_key=b"k")
    dispatcher = a_dispatcher()
    join(dispatcher, DECODES)
    join(dispatcher, PREFILLS)

    def ask(*, is_lost: bool = False) -> list[str | None]:
        attempt = begun(dispatcher, retries, demand)
        legs = [leg for leg in (attempt.decode, attempt.prefill) if leg is not None]
        for leg in legs:
            dispatcher.sent(leg, 0.0)
        if is_lost:
            dispatcher.failed(attempt, Retries(max_attempts=2), LegFailure.WORKER_GONE)
        dispatcher.end(attempt)
        return [leg.reservation.affinity for leg in legs]

    assert [ask(is_lost=True), ask(), ask(), ask(is_lost=True), ask()] == [
        ["miss", "miss"],
        ["miss", "miss"],
        ["hit", "hit"],
        ["hit", "hit"],
        ["hit", "hit"],
    ]


def test_pins_outlast_a_broken_link_and_no_process(retries: Retries):
    demand = Demand(num_prompt=40, max_new_tokens=8, affinity_key=b"k")
    dispatcher = a_dispatcher()
    join(dispatcher, DECODES[:1], role="both")

    def ask() -> str | None:
        attempt = begun(dispatcher, retries, demand)
        dispatcher.sent(attempt.decode, 0.0)
        dispatcher.end(attempt)
        return attempt.decode.reservation.affinity

    assert [ask(), ask()] == ["miss", "hit"]
    found = []
    for epoch in (1, 2, 2, 1):
        dispatcher.leave(DECODES[0])
        join(dispatcher, DECODES[:1], role="both", first_epoch=epoch)
        found.append(ask())
    assert found == ["hit", "miss", "hit", "miss"]


def test_a_prompt_that_is_known_where_it_decodes_is_prefilled_there_by_the_static_rule(retries: Retries):
    prompt = tuple(range(40))
    names = block_names(root_name(b"m", b"d", b"s"), prompt, 16)
    for min_known, is_local in ((0.8, True), (0.81, False)):
        dispatcher = a_dispatcher(prefill=PrefillRule(kind="static", min_known_share=min_known))
        join(dispatcher, DECODES[:1])
        join(dispatcher, PREFILLS)
        for name in names:  # of 32 tokens of its 40
            dispatcher.router.index.add(dispatcher.router.home_number(Home(DECODES[0], 0)), name)
        attempt = begun(dispatcher, retries, Demand(num_prompt=40, max_new_tokens=1, names=names))
        assert attempt.is_local_prefill is is_local


def test_by_cost_a_burst_is_shared_between_both_places_though_no_report_tells_of_it(demand: Demand):
    dispatcher = a_dispatcher(prefill=PrefillRule(kind="cost"))
    join(dispatcher, DECODES[:1])
    join(dispatcher, PREFILLS[:1])
    for _ in range(4):
        attempt = begun(dispatcher, Retries(max_attempts=1), demand)
        dispatcher.first_token(attempt, 0.1, cached_tokens=0, prefill_ms=100.0)
        dispatcher.end(attempt)
        assert attempt.prefill is not None  # nothing was known of how long that takes
    burst = [begun(dispatcher, Retries(max_attempts=1), demand) for _ in range(12)]
    num_local = sum(attempt.is_local_prefill for attempt in burst)
    assert 3 <= num_local <= 9
    for attempt in burst:
        dispatcher.end(attempt)
    assert not dispatcher._place._begun_tokens


def test_the_least_time_to_a_first_token_is_that_of_the_soonest_home_and_is_looked_up_seldom(
    monkeypatch: pytest.MonkeyPatch,
):
    dispatcher = a_dispatcher()
    join(dispatcher, (*DECODES, PREFILLS[0]))
    assert dispatcher.least_ttft_s(0.0) is None
    for address, seconds in zip((*DECODES, PREFILLS[0]), (0.5, 0.25, 4.0), strict=True):
        for _ in range(MIN_SAMPLES):
            dispatcher.forecast.model.observe(address, own_tokens=1, queued_tokens=0, ttft_s=seconds)
    num_looks, look = 0, dispatcher.router.queues

    def queues(homes: Sequence[Home]) -> np.ndarray:
        nonlocal num_looks
        num_looks += 1
        return look(homes)

    monkeypatch.setattr(dispatcher.router, "queues", queues)
    assert dispatcher.least_ttft_s(LEAST_TTFT_S) == pytest.approx(0.25)
    dispatcher.fleet.report(DECODES[1], MemberLoad(is_draining=True))
    assert all(dispatcher.least_ttft_s(1.5 * LEAST_TTFT_S) == pytest.approx(0.25) for _ in range(100))
    assert num_looks == 1
    assert dispatcher.least_ttft_s(2 * LEAST_TTFT_S) == pytest.approx(0.5)


FAILURES = (*Cause, *LegFailure)


@settings(max_examples=60)
@given(data=st.data(), kind=st.sampled_from(("static", "cost")))
def test_whatever_happens_every_token_is_given_back_and_no_request_is_tried_for_ever(data: st.DataObject, kind: str):
    dispatcher = a_dispatcher(prefill=PrefillRule(kind="cost" if kind == "cost" else "static"), ttft_slo_s="auto")
    places, epoch, now_s = (*DECODES, *PREFILLS), 0, 0.0
    there: set[str] = set()
    running: list[tuple[Attempt, Retries]] = []
    answers: list[Refusal | Wait] = []

    def begin(retries: Retries) -> None:
        key = data.draw(st.sampled_from((None, b"a", b"b")))
        demand = Demand(num_prompt=data.draw(st.integers(1, 100)), max_new_tokens=10, affinity_key=key)
        answer = dispatcher.begin(demand, retries, now_s, is_resumed=data.draw(st.booleans()))
        if isinstance(answer, Attempt):
            running.append((answer, retries))
            other = {address for address in there if address in DECODES} - {answer.decode.home.worker}
            if answer.decode.epoch in retries.failed_epochs:
                assert all(dispatcher.fleet.member_at(address).epoch in retries.failed_epochs for address in other)
        else:
            answers.append(answer)

    for _ in range(data.draw(st.integers(1, 40))):
        now_s += data.draw(st.sampled_from((0.0, 0.5, 20.0)))
        what = data.draw(st.sampled_from(("worker", "begin", "begin", "sent", "token", "load", "fail", "end")))
        address = data.draw(st.sampled_from(places))
        one = data.draw(st.sampled_from(running)) if running else None
        if what == "worker" and address in there:
            dispatcher.leave(address)
            there.remove(address)
        elif what == "worker":
            epoch += 1
            role = "prefill" if address in PREFILLS else data.draw(st.sampled_from(("both", "decode")))
            dispatcher.join(a_member(address, epoch=epoch, role=role))
            there.add(address)
        elif what == "load" and address in there:
            dispatcher.fleet.report(address, MemberLoad(queued_tokens=[data.draw(st.integers(0, 500))], num_running=3))
        elif what == "begin":
            begin(Retries(max_attempts=MAX_ATTEMPTS))
        elif one is None:
            continue
        elif what == "sent":
            dispatcher.sent(one[0].prompt, now_s)
        elif what == "token" and not one[0].has_begun:
            dispatcher.first_token(one[0], now_s, cached_tokens=0, prefill_ms=data.draw(st.floats(1, 100)))
        elif what == "end":
            dispatcher.prefill_over(one[0])
            dispatcher.end(one[0])
            running.remove(one)
        elif what == "fail":
            attempt, retries = one
            dispatcher.end(attempt)
            running.remove(one)
            if dispatcher.failed(attempt, retries, data.draw(st.sampled_from(FAILURES)), retry_after_s=1.0):
                begin(retries)
            assert retries.num_failed <= MAX_ATTEMPTS
    for attempt, _ in running:
        dispatcher.end(attempt)
    assert in_flight(dispatcher) == [0] * len(places)
    assert not dispatcher._place._begun_tokens
