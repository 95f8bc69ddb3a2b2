"""What a gateway's router is told of its workers: which blocks they know, how much they have to do, which are new.

Stands between the links, which bring messages, and the router, which knows none. A worker counts what it was sent; what
was sent after its last report is not in that report, and the router adds it. Left out: decisions.
"""

from collections import deque

from moonshard.kv.prefix import split_names
from moonshard.rpc import link_pb2
from moonshard.serving.control.routing.pins import Pins
from moonshard.serving.control.routing.prefix_index import PrefixChange, PrefixSubscriber
from moonshard.serving.control.routing.router import Home, Reservation, Router
from moonshard.serving.gateway.workers.session import WorkerSession

TELL_PREFIXES = link_pb2.GatewayMessage(tell_prefixes=link_pb2.TellPrefixes())


def homes_of(session: WorkerSession) -> list[Home]:
    """One for each partition of a worker."""
    return [Home(session.address, partition) for partition in range(session.welcome.num_partitions)]


class Knowledge:
    """Of all workers of one gateway."""

    def __init__(self, router: Router, pins: Pins):
        self._router = router
        self._pins = pins
        self._epochs: dict[str, int] = {}  # by address: the last one there
        self._subscribers: dict[WorkerSession, PrefixSubscriber] = {}
        self._asked: set[WorkerSession] = set()  # for a snapshot, which is on its way
        self._unseen: dict[WorkerSession, deque[tuple[int, Reservation]]] = {}

    def begin(self, session: WorkerSession) -> None:
        """A worker is there: ask what it knows. No session was with it if it is another process than the last one."""
        homes = tuple(self._router.home_number(home) for home in homes_of(session))
        if self._epochs.get(session.address, session.epoch) != session.epoch:
            for home in homes:
                self._pins.end(home)
        self._epochs[session.address] = session.epoch
        self._subscribers[session] = PrefixSubscriber(self._router.index, homes)
        self._unseen[session] = deque()
        self._asked.add(session)
        session.send(TELL_PREFIXES)

    def end(self, session: WorkerSession) -> None:
        """It is lost: what it knew may be gone, and it reports nothing."""
        if (heard := self._subscribers.pop(session, None)) is not None:
            heard.gone()
        self._unseen.pop(session, None)
        self._asked.discard(session)
        for home in homes_of(session):
            self._router.silent(home)

    def prefixes(self, session: WorkerSession, message: link_pb2.WorkerMessage) -> None:
        """After a gap everything is asked for anew; what is malformed is a gap."""
        heard = self._subscribers.get(session)
        if heard is None:
            return
        if message.WhichOneof("message") == "prefix_snapshot":
            snapshot = message.prefix_snapshot
            pairs = zip(heard.homes, snapshot.names, strict=False)
            names = ((home, name) for home, joined in pairs for name in split_names(joined))
            heard.snapshot(session.epoch, snapshot.next_number, names)
            self._asked.discard(session)
        elif not self._take_events(heard, session.epoch, message.prefix_events) and session not in self._asked:
            self._asked.add(session)
            session.send(TELL_PREFIXES)

    def _take_events(self, heard: PrefixSubscriber, epoch: int, events: link_pb2.PrefixEvents) -> bool:
        names = split_names(events.names)
        is_sound = len(names) == len(events.partitions) == len(events.is_known)
        if not is_sound or any(partition >= len(heard.homes) for partition in events.partitions):
            return False
        rows = zip(events.partitions, names, events.is_known, strict=True)
        said = [PrefixChange(heard.homes[partition], name, is_known) for partition, name, is_known in rows]
        return heard.events(epoch, events.first_number, said)

    def sent(self, session: WorkerSession, reservation: Reservation) -> None:
        """The request of this reservation has just been sent, or its leg."""
        if (unseen := self._unseen.get(session)) is not None:
            unseen.append((session.num_sent, reservation))

    def loaded(self, session: WorkerSession) -> None:
        """A report came: of each partition, what is to be prefilled and, where it decodes, what is held or to come."""
        load, unseen = session.load, self._unseen.get(session)
        while unseen and unseen[0][0] <= load.num_seen:
            self._router.seen(unseen.popleft()[1])
        held = load.active_tokens if session.role != "prefill" else [0] * len(load.queued_tokens)
        homes, reserved = homes_of(session), load.reserved_tokens or [0] * len(held)
        for home, queued, active, coming in zip(homes, load.queued_tokens, held, reserved, strict=False):
            self._router.report(home, queued + active + coming)
