"""Of a worker that has left for good nothing is kept, once what ran there has ended, whatever happened before."""

from hypothesis import given
from hypothesis import strategies as st

from moonshard.serving.config.keys import RoutingConfig
from moonshard.serving.control.dispatch.attempt import Attempt
from moonshard.serving.control.dispatch.dispatcher import Demand, Dispatcher
from moonshard.serving.control.dispatch.retries import LegFailure, Retries
from moonshard.serving.control.members.fleet import Member
from moonshard.serving.control.routing.router import Ask, Home, Router
from moonshard.serving.gateway.workers.dispatching import dispatcher_of

MAX_WORKERS = 3
NUM_PARTITIONS = 2
BELOW = 2  # the numbers of its tiers
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["come", "go", "begin", "sent", "token", "failed", "end", "report", "fetches"]),
        st.integers(0, 5),
        st.integers(0, 40),
    ),
    max_size=80,
)


class World:
    """A dispatcher, and what somebody who drives it knows: who is there, and which attempts are open."""

    def __init__(self) -> None:
        self.dispatcher: Dispatcher = dispatcher_of([], RoutingConfig(local_prefill="static", ttft_slo_s=None))
        self.there: dict[str, Member] = {}
        self.open: list[Attempt] = []
        self.sent: set[int] = set()
        self.epochs = 0
        self.now_s = 0.0
        for which in (0, 2):  # which decode
            self.come(which)

    def come(self, which: int) -> None:
        address = f"worker {which}:1"
        if address in self.there or len(self.there) == MAX_WORKERS:
            return
        self.epochs += 1
        member = Member(
            address=address,
            epoch=self.epochs,
            role=("both", "prefill", "decode")[which % 3],
            num_partitions=NUM_PARTITIONS,
            fingerprint="f",
            dtype="float32",
            vocab_size=10,
            block_size=16,
            max_context_tokens=1000,
        )
        self.dispatcher.expect(address)
        self.dispatcher.join(member)
        self.there[address] = member
        for home in member.homes:
            self.dispatcher.router.index.add(self.dispatcher.router.home_number(home), b"system prompt")

    def go(self, which: int) -> None:
        """As a pool removes it: its session ends; requests hear of that later."""
        if (member := self.there.pop(f"worker {which}:1", None)) is None:
            return
        self.dispatcher.leave(member.address)
        self.dispatcher.forget(member.address)

    def begin(self, which: int, number: int) -> None:
        key = bytes([number % 4]) if number % 5 else None
        demand = Demand(num_prompt=40, max_new_tokens=8, names=(b"system prompt", b"%d" % number), affinity_key=key)
        answer = self.dispatcher.begin(demand, Retries(max_attempts=3), self.now_s)
        if isinstance(answer, Attempt):
            self.open.append(answer)
            if number % 2:
                self.go_on("sent", answer)

    def do(self, what: str, which: int, number: int) -> None:
        self.now_s += number / 10
        if what in ("come", "go"):
            (self.come if what == "come" else self.go)(which)
        elif what == "begin":
            self.begin(which, number)
        elif what == "report" and self.there:
            member = list(self.there.values())[which % len(self.there)]
            self.dispatcher.router.report(member.homes[0], number)
        elif what == "fetches" and self.there:
            member = list(self.there.values())[which % len(self.there)]
            self.dispatcher.router.fetches(member.homes, *_tiers(member), 0.5, 0.5)
        elif self.open:
            self.go_on(what, self.open[which % len(self.open)])

    def go_on(self, what: str, attempt: Attempt) -> None:
        if what == "sent" and id(attempt) not in self.sent:
            self.sent.add(id(attempt))
            for leg in (attempt.decode, attempt.prefill):
                if leg is not None:
                    self.dispatcher.sent(leg, self.now_s)
        elif what == "token" and not attempt.has_begun:
            self.dispatcher.first_token(attempt, self.now_s, cached_tokens=0, prefill_ms=1.0)
        elif what in ("failed", "end"):
            if what == "failed":
                self.dispatcher.failed(attempt, Retries(max_attempts=3), LegFailure.WORKER_GONE)
            self.dispatcher.end(attempt)
            self.open.remove(attempt)


def _tiers(member: Member) -> tuple[Home, Home]:
    return Home(member.address, NUM_PARTITIONS), Home(member.address, NUM_PARTITIONS + 1)


def left_by_all(steps: list[tuple[str, int, int]]) -> World:
    """After these steps every worker has gone and every attempt has ended."""
    world = World()
    for what, which, number in steps:
        world.do(what, which, number)
    for which in range(6):
        world.go(which)
    for attempt in tuple(world.open):
        world.go_on("end", attempt)
    return world


@given(STEPS)
def test_nothing_is_left_of_workers_that_left(steps: list[tuple[str, int, int]]):
    world = left_by_all(steps)
    dispatcher, router = world.dispatcher, world.dispatcher.router
    kept = (router._numbers, router._of_worker, router._reservations, router._unsent, router._coming, router._unseen)
    assert not any(kept)
    assert (len(router.index), router.index._names, router._pins.num_pins) == (0, {}, 0)
    assert [len(conversations) for conversations in router._conversations] == [0, 0]
    loads = router._loads
    for column in (loads.in_flight, loads.unseen, loads.total, loads.recent, loads.conversations):
        assert not column.any()
    assert sorted(loads._free) == list(range(len(loads)))
    assert (router._below._own < 0).all()
    assert not len(router._below._shared_numbers)
    assert not dispatcher._epochs
    assert not dispatcher._leaving
    assert not dispatcher.fleet._order
    assert not dispatcher.forecast.model._workers
    assert not dispatcher._place._begun_tokens


@given(STEPS)
def test_numbers_are_used_again(steps: list[tuple[str, int, int]]):
    """As many workers as like may come, one after another."""
    world = World()
    for what, which, number in steps:
        world.do("end" if what == "begin" else what, which, number)
        assert len(world.dispatcher.router._loads) <= MAX_WORKERS * (NUM_PARTITIONS + BELOW)


@given(STEPS)
def test_who_comes_to_a_number_that_was_used_before_finds_nothing_there(steps: list[tuple[str, int, int]]):
    world = left_by_all(steps)
    world.come(0)
    router = world.dispatcher.router
    member = next(iter(world.there.values()))
    assert [router.queued_tokens(home) for home in member.homes] == [0, 0]
    assert [router.num_known_blocks(home) for home in member.homes] == [1, 1]
    world.begin(0, 2)
    (attempt,) = world.open
    assert attempt.prompt.reservation.affinity == "miss"


def test_what_comes_late_of_a_worker_that_left_is_forgotten_too():
    world = World()
    world.begin(0, 1)
    (attempt,) = world.open
    world.go(0 if attempt.decode.home.worker == "worker 0:1" else 2)
    assert world.dispatcher.router._of_worker.keys() == {"worker 0:1", "worker 2:1"}  # as long as something is open
    world.go_on("token", attempt)
    world.go_on("end", attempt)
    assert not world.dispatcher.forecast.model._workers
    assert len(world.dispatcher.router._of_worker) == 1


def test_a_conversation_never_goes_back_to_a_home_that_left():
    router, (left, there) = Router(), (Home("left", 0), Home("there", 0))
    ask = Ask(num_tokens=1, num_prompt=1, affinity_key=b"k")
    first = router.reserve([left], ask)
    assert first is not None
    router.sent(first, 0.0)
    router.release(first)
    moving = router.reserve([there], ask)
    assert moving is not None
    assert router.forget("left")
    router.release(moving)  # unsent: it would be where it was
    assert not router._loads.conversations.any()
    assert len(router._conversations[0]) == 0


def test_who_comes_back_before_its_last_attempt_has_ended_stays_known():
    world = World()
    world.begin(0, 1)
    [attempt] = world.open
    address = attempt.decode.reservation.home.worker
    which = int(address.removeprefix("worker ").removesuffix(":1"))
    world.go(which)
    world.come(which)
    world.go_on("end", attempt)
    router = world.dispatcher.router
    assert [router.num_known_blocks(home) for home in world.there[address].homes] == [1] * NUM_PARTITIONS
