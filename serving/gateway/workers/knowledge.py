"""What a gateway's control plane is told of its workers: who is there, which blocks they know, what they have to do.

Between the links, which bring messages, and the dispatcher, which knows none. A worker counts what it was sent; what
was sent after its last report is not in that report, and the router adds it. Nothing is decided here.
"""

import time
from collections import deque
from dataclasses import dataclass, field

from moonshard.kv.prefix import Below, split_names
from moonshard.rpc import link_pb2
from moonshard.rpc.status import FailedPrecondition
from moonshard.serving.control.dispatch.attempt import AttemptLeg
from moonshard.serving.control.dispatch.dispatcher import Dispatcher
from moonshard.serving.control.members.fleet import Member, MemberLoad
from moonshard.serving.control.routing.prefix_index import PrefixChange, PrefixSubscriber
from moonshard.serving.control.routing.router import Home, Reservation
from moonshard.serving.gateway.workers.session import WorkerSession

TELL_PREFIXES = link_pb2.GatewayMessage(tell_prefixes=link_pb2.TellPrefixes())


def member_of(address: str, welcome: link_pb2.Welcome) -> Member:
    return Member(
        address=address,
        epoch=int.from_bytes(welcome.epoch, "big"),
        role=welcome.role,
        num_partitions=welcome.num_partitions,
        fingerprint=welcome.fingerprint,
        dtype=welcome.dtype,
        vocab_size=welcome.vocab_size,
        block_size=welcome.block_size,
        max_context_tokens=welcome.max_context_tokens,
        num_processes=welcome.num_processes or 1,
    )


@dataclass(kw_only=True, slots=True)
class _Heard:
    """What one session has told."""

    member: Member
    homes: tuple[Home, ...]  # the member's
    prefixes: PrefixSubscriber
    fetch_shares: tuple[float, float] | None = None  # that the router was told of; None: it has no tiers so far
    unseen: deque[tuple[int, Reservation]] = field(default_factory=deque)  # and the number of its message
    is_asked: bool = True  # for a snapshot, which is on its way


class Knowledge:
    """What all workers of one gateway have told."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self._router = dispatcher.router
        self._heard: dict[WorkerSession, _Heard] = {}
        self._by_epoch: dict[int, WorkerSession] = {}

    def session_of(self, epoch: int) -> WorkerSession | None:
        """The session with that process, if there is one now."""
        return self._by_epoch.get(epoch)

    def session_at(self, address: str) -> WorkerSession:
        """KeyError where no worker is there."""
        return self._by_epoch[self.dispatcher.fleet.member_at(address).epoch]

    def knows(self, name: bytes) -> bool:
        """Whether some worker has said that it has this block."""
        return bool(self._router.index.num_known([name]))

    def misfit(self, address: str, welcome: link_pb2.Welcome) -> FailedPrecondition | None:
        """Why this worker cannot be one of those that are there."""
        misfit = self.dispatcher.fleet.misfit(member_of(address, welcome))
        return None if misfit is None else FailedPrecondition(misfit.message, field=misfit.field)

    def expect(self, address: str) -> None:
        """A worker may come there from now on."""
        self.dispatcher.expect(address)

    def forget(self, address: str) -> None:
        """No worker will come there, and there is no session: what was learned of it is forgotten."""
        self.dispatcher.forget(address)

    def begin(self, session: WorkerSession) -> None:
        """A worker that fits has come: it is asked which blocks it knows."""
        member = member_of(session.address, session.welcome)
        self.dispatcher.join(member)
        self._by_epoch[member.epoch] = session
        spaces = range(len(member.spaces))
        numbers = tuple(self._router.home_number(Home(member.address, space)) for space in spaces)
        prefixes = PrefixSubscriber(self._router.index, numbers)
        self._heard[session] = _Heard(member=member, homes=member.homes, prefixes=prefixes)
        session.send(TELL_PREFIXES)

    def end(self, session: WorkerSession) -> None:
        """A worker is lost: the blocks that it knew are forgotten, and its reports end."""
        if (heard := self._heard.pop(session, None)) is None:
            return
        heard.prefixes.gone()
        del self._by_epoch[session.epoch]
        self.dispatcher.leave(session.address)

    def prefixes(self, session: WorkerSession, message: link_pb2.WorkerMessage) -> None:
        """Takes news of a prefix cache. After a gap, or a malformed message, everything is asked for anew."""
        heard = self._heard.get(session)
        if heard is None:
            return
        if message.WhichOneof("message") == "prefix_snapshot":
            snapshot = message.prefix_snapshot
            pairs = zip(heard.prefixes.homes, snapshot.names, strict=False)
            names = ((home, name) for home, joined in pairs for name in split_names(joined))
            parts = {"goes_on": snapshot.goes_on, "has_more": snapshot.has_more}
            heard.prefixes.snapshot(session.epoch, snapshot.next_number, names, **parts)
            heard.is_asked = snapshot.has_more
        elif not _take_events(heard.prefixes, session.epoch, message.prefix_events) and not heard.is_asked:
            heard.is_asked = True
            session.send(TELL_PREFIXES)

    def sent(self, session: WorkerSession, leg: AttemptLeg) -> None:
        """A leg of an attempt has just been sent there."""
        self.dispatcher.sent(leg, time.monotonic())
        if (heard := self._heard.get(session)) is not None:
            heard.unseen.append((session.num_sent, leg.reservation))

    def loaded(self, session: WorkerSession) -> bool:
        """Takes a report: for each partition the tokens to be prefilled and, where the worker decodes, those that are
        held or to come.

        Says whether the worker has become routable, or has ceased to be.
        """
        load, heard = session.load, self._heard[session]
        while heard.unseen and heard.unseen[0][0] <= load.num_seen:
            self._router.seen(heard.unseen.popleft()[1])
        queued_tokens = tuple(load.queued_tokens)
        held = load.active_tokens if session.role != "prefill" else [0] * len(queued_tokens)
        reserved = load.reserved_tokens or [0] * len(held)
        for home, queued, active, coming in zip(heard.homes, queued_tokens, held, reserved, strict=False):
            self._router.report(home, queued + active + coming)
        if load.HasField("kv_store"):
            self._fetches(heard, (load.kv_store.own_fetch_share, load.kv_store.shared_fetch_share))
        said = MemberLoad(is_draining=load.draining, queued_tokens=queued_tokens, num_running=load.num_running)
        return self.dispatcher.fleet.report(session.address, said)

    def _fetches(self, heard: _Heard, shares: tuple[float, float]) -> None:
        """Tells the router what changed: reports come with every step, and they change a few times a second."""
        if shares == heard.fetch_shares:
            return
        heard.fetch_shares = shares
        member, spaces = heard.member, heard.member.spaces
        for process in range(member.num_processes):
            homes = [heard.homes[partition] for partition in spaces.partitions_of(process)]
            own, shared = (Home(member.address, spaces.below(below, process)) for below in (Below.OWN, Below.SHARED))
            self._router.fetches(homes, own, shared, *shares)


def _take_events(prefixes: PrefixSubscriber, epoch: int, events: link_pb2.PrefixEvents) -> bool:
    """False where some are missing, or malformed."""
    names = split_names(events.names)
    is_sound = len(names) == len(events.partitions) == len(events.is_known)
    if not is_sound or any(partition >= len(prefixes.homes) for partition in events.partitions):
        return False
    rows = zip(events.partitions, names, events.is_known, strict=True)
    said = [PrefixChange(prefixes.homes[partition], name, is_known) for partition, name, is_known in rows]
    return prefixes.events(epoch, events.first_number, said)
