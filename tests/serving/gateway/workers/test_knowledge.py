"""What workers tell of their blocks and their load, right and wrong: the router believes no more than it may."""

from collections.abc import Sequence

import pytest

from moonshard.kv.prefix import NAME_BYTES
from moonshard.rpc import link_pb2
from moonshard.serving.control.dispatch.attempt import AttemptLeg
from moonshard.serving.control.dispatch.dispatcher import Dispatcher, DispatchRules
from moonshard.serving.control.dispatch.prefill_place import PrefillRule
from moonshard.serving.control.members.fleet import Fleet
from moonshard.serving.control.routing.policies import affinity
from moonshard.serving.control.routing.router import Ask, Router
from moonshard.serving.gateway.workers.knowledge import TELL_PREFIXES, Knowledge, member_of
from moonshard.serving.gateway.workers.session import WorkerSession

NAMES = [bytes([number]) * NAME_BYTES for number in range(6)]


class Told:
    """A session with a worker of two partitions, and what the gateway said to it."""

    def __init__(self, router: Router, *, epoch: int = 1, role: str = "both", num_processes: int = 0):
        welcome = link_pb2.Welcome(
            epoch=epoch.to_bytes(16, "big"),
            role=role,
            num_partitions=2,
            block_size=64,
            num_processes=num_processes,
        )
        self.session = WorkerSession(
            address="a:1", welcome=welcome, on_handoff=lambda *_: None, on_prefixes=lambda *_: None
        )
        self._said: list[link_pb2.GatewayMessage] = []
        self.homes = member_of(self.session.address, welcome).homes
        self.router = router

    @property
    def said(self) -> list[link_pb2.GatewayMessage]:
        """All messages so far."""
        while not self.session.outgoing.empty():
            self._said.append(self.session.outgoing.get_nowait())
        return self._said

    def known(self) -> list[int]:
        """How many blocks of the chain of all names each partition is thought to have."""
        found = self.router.index.num_known(NAMES)
        return [found.get(self.router.home_number(home), 0) for home in self.homes]


@pytest.fixture
async def dispatcher() -> Dispatcher:
    return Dispatcher(
        Fleet(["a:1"]), Router(), DispatchRules(failover_wait_s=0.0, ttft_slo_s=None, prefill=PrefillRule()), affinity
    )


@pytest.fixture
async def router(dispatcher: Dispatcher) -> Router:
    return dispatcher.router


@pytest.fixture
async def told(router: Router) -> Told:
    return Told(router)


@pytest.fixture
async def knowledge(dispatcher: Dispatcher, told: Told) -> Knowledge:
    knowledge = Knowledge(dispatcher)
    knowledge.begin(told.session)
    assert told.said == [TELL_PREFIXES]
    knowledge.prefixes(told.session, snapshot(0, NAMES[:2], ()))
    return knowledge


def snapshot(next_number: int, *names: Sequence[bytes]) -> link_pb2.WorkerMessage:
    joined = [b"".join(part) for part in names]
    return link_pb2.WorkerMessage(prefix_snapshot=link_pb2.PrefixSnapshot(next_number=next_number, names=joined))


def events(first: int, *rows: tuple[int, bytes, bool]) -> link_pb2.WorkerMessage:
    partitions, names, is_known = zip(*rows, strict=True)
    return link_pb2.WorkerMessage(
        prefix_events=link_pb2.PrefixEvents(
            first_number=first, partitions=partitions, names=b"".join(names), is_known=is_known
        )
    )


async def test_events_add_to_the_snapshot_and_take_away(knowledge: Knowledge, told: Told):
    assert told.known() == [2, 0]
    knowledge.prefixes(told.session, events(0, (0, NAMES[2], True), (1, NAMES[0], True), (0, NAMES[2], False)))
    assert told.known() == [2, 1]
    assert len(told.said) == 1


async def test_what_comes_twice_counts_once(knowledge: Knowledge, told: Told):
    message = events(0, (0, NAMES[2], True), (0, NAMES[2], False))
    knowledge.prefixes(told.session, message)
    knowledge.prefixes(told.session, message)
    assert told.known() == [2, 0]
    assert len(told.said) == 1


@pytest.mark.parametrize(
    "message",
    [
        events(7, (0, NAMES[2], True)),
        events(0, (4, NAMES[2], True)),
        link_pb2.WorkerMessage(prefix_events=link_pb2.PrefixEvents(partitions=[0], names=NAMES[2], is_known=[])),
        link_pb2.WorkerMessage(prefix_events=link_pb2.PrefixEvents(partitions=[0], names=b"", is_known=[True])),
    ],
    ids=["a gap", "a partition that it has not", "no word of what became of it", "no name"],
)
async def test_what_is_missing_or_malformed_is_asked_for_anew_and_changes_nothing(
    knowledge: Knowledge, told: Told, message: link_pb2.WorkerMessage
):
    knowledge.prefixes(told.session, message)
    assert told.known() == [2, 0]
    assert told.said[1:] == [TELL_PREFIXES]
    knowledge.prefixes(told.session, snapshot(9, NAMES[:1], NAMES[:4]))
    assert told.known() == [1, 4]
    knowledge.prefixes(told.session, events(9, (0, NAMES[1], True)))
    assert told.known() == [2, 4]


async def test_a_snapshot_of_more_partitions_than_there_are_is_cut(knowledge: Knowledge, told: Told):
    knowledge.prefixes(told.session, snapshot(3, NAMES[:1], NAMES[:1], NAMES[:5]))
    assert told.known() == [1, 1]


async def test_a_snapshot_in_parts_is_asked_for_once(knowledge: Knowledge, told: Told):
    knowledge.prefixes(told.session, events(9, (0, NAMES[3], True)))  # after a gap
    assert told.said[1:] == [TELL_PREFIXES]
    first, second = snapshot(9, NAMES[:3], ()), snapshot(9, (), NAMES[:2])
    first.prefix_snapshot.has_more = second.prefix_snapshot.goes_on = True
    knowledge.prefixes(told.session, first)
    knowledge.prefixes(told.session, events(9, (0, NAMES[3], True)))
    knowledge.prefixes(told.session, second)
    assert told.known() == [3, 2]
    assert told.said[1:] == [TELL_PREFIXES]
    knowledge.prefixes(told.session, events(9, (0, NAMES[3], True)))
    assert told.known() == [4, 2]


async def test_a_lost_worker_knows_nothing_and_what_it_still_says_is_not_heard(knowledge: Knowledge, told: Told):
    knowledge.end(told.session)
    assert told.known() == [0, 0]
    knowledge.prefixes(told.session, snapshot(0, NAMES, NAMES))
    knowledge.prefixes(told.session, events(0, (0, NAMES[0], True)))
    assert told.known() == [0, 0]
    assert len(told.said) == 1


async def test_another_process_at_the_address_begins_with_nothing(knowledge: Knowledge, told: Told, router: Router):
    knowledge.end(told.session)
    again = Told(router, epoch=2)
    knowledge.begin(again.session)
    assert again.known() == [0, 0]
    knowledge.prefixes(again.session, snapshot(5, NAMES[:3], ()))
    knowledge.prefixes(told.session, events(5, (0, NAMES[3], True)))  # the dead one's, late
    assert again.known() == [3, 0]


async def test_sessions_outlast_a_broken_link_and_no_process(knowledge: Knowledge, told: Told, router: Router):
    def ask() -> str | None:
        reservation = router.reserve(told.homes, Ask(num_tokens=1, affinity_key=b"s"), policy=affinity, now_s=1.0)
        assert reservation is not None
        router.sent(reservation, now_s=1.0)
        router.release(reservation)
        return reservation.affinity

    assert [ask(), ask()] == ["miss", "hit"]
    session, found = told.session, []
    for epoch in (1, 2, 2, 1):
        knowledge.end(session)
        session = Told(router, epoch=epoch).session
        knowledge.begin(session)
        found.append(ask())
    assert found == ["hit", "miss", "hit", "miss"]


async def test_prompts_on_their_way_to_a_worker_are_counted_until_it_holds_them(
    knowledge: Knowledge, told: Told, router: Router
):
    load = link_pb2.WorkerLoad(queued_tokens=[5, 0], active_tokens=[10, 0], reserved_tokens=[100, 7])
    told.session.load.CopyFrom(load)
    knowledge.loaded(told.session)
    assert [router.queued_tokens(home) for home in told.homes] == [115, 7]


async def test_what_was_sent_is_added_to_a_report_that_does_not_count_it_yet(
    knowledge: Knowledge, told: Told, router: Router
):
    def report(num_seen: int, queued: int) -> None:
        told.session.load.CopyFrom(
            link_pb2.WorkerLoad(queued_tokens=[queued, 0], active_tokens=[0, 0], num_seen=num_seen)
        )
        knowledge.loaded(told.session)

    report(0, 0)
    reservation = router.reserve(told.homes[:1], Ask(num_tokens=100))
    assert reservation is not None
    told.session.num_sent += 1
    knowledge.sent(told.session, AttemptLeg(reservation, told.session.epoch))
    report(0, 0)
    assert router.queued_tokens(told.homes[0]) == 100
    report(1, 60)
    assert router.queued_tokens(told.homes[0]) == 60
    router.release(reservation)
    assert router.queued_tokens(told.homes[0]) == 60


@pytest.mark.parametrize("process", [0, 1])
async def test_of_a_gang_those_partitions_fetch_from_a_members_tiers_that_are_its_own(
    dispatcher: Dispatcher, router: Router, process: int
):
    gang = Told(router, num_processes=2)
    knowledge = Knowledge(dispatcher)
    knowledge.begin(gang.session)
    spaces: list[Sequence[bytes]] = [
        (),
        (),
        (),
        (),
        NAMES[:2],
    ]  # two partitions, two members' own tiers, the shared one
    spaces[2 + process] = NAMES
    knowledge.prefixes(gang.session, snapshot(0, *spaces))
    store = link_pb2.KvStore(own_fetch_share=0.5, shared_fetch_share=0.5)
    gang.session.load.CopyFrom(link_pb2.WorkerLoad(queued_tokens=[0, 0], active_tokens=[0, 0], kv_store=store))
    knowledge.loaded(gang.session)
    left = [
        router.reserve([home], Ask(num_tokens=6 * 64, num_prompt=6 * 64, is_prefill=True, names=NAMES))
        for home in gang.homes
    ]
    saved = [6 * 64 - each.num_left_tokens for each in left if each is not None]
    assert saved[process] == 6 * 64 / 2
    assert saved[1 - process] == 2 * 64 / 2  # all find that in the shared tier
