"""What the loop's gateway knows of its workers: who is there, what each has heard, and what it reports."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from moonshard.serving.control.dispatch.attempt import AttemptLeg
from moonshard.serving.control.dispatch.dispatcher import Dispatcher
from moonshard.serving.control.members.fleet import Member, MemberLoad
from moonshard.serving.control.routing.prefix_index import PrefixChange, PrefixSubscriber
from moonshard.serving.control.routing.router import Reservation
from tests.serving.control.loop.messages import Leg, News, Report, Submit, ToWorker, Welcome


@dataclass(eq=False, kw_only=True, slots=True)
class _Session:
    """A worker's process, as long as the gateway has a link to it."""

    member: Member
    send: Callable[[ToWorker], None]
    prefixes: PrefixSubscriber
    num_sent: int = 0
    unseen: deque[tuple[int, Reservation]] = field(default_factory=deque)


class Links:
    def __init__(self, dispatcher: Dispatcher):
        self._dispatcher, self._router = dispatcher, dispatcher.router
        self._sessions: dict[int, _Session] = {}  # by epoch

    def begin(self, welcome: Welcome, send: Callable[[ToWorker], None]) -> None:
        member = welcome.member
        assert self._dispatcher.fleet.misfit(member) is None
        self._dispatcher.join(member)
        numbers = tuple(self._router.home_number(home) for home in member.homes)
        prefixes = PrefixSubscriber(self._router.index, numbers)
        known = ((number, name) for number, names in zip(numbers, welcome.known, strict=True) for name in names)
        prefixes.snapshot(member.epoch, welcome.next_number, known)
        self._sessions[member.epoch] = _Session(member=member, send=send, prefixes=prefixes)

    def end(self, epoch: int) -> bool:
        """Ends the session; returns whether there was one."""
        session = self._sessions.pop(epoch, None)
        if session is None:
            return False
        session.prefixes.gone()
        self._dispatcher.leave(session.member.address)
        return True

    def is_there(self, epoch: int) -> bool:
        return epoch in self._sessions

    def send(self, epoch: int, message: ToWorker) -> None:
        """Sends a message; it is dropped where that process is gone."""
        if (session := self._sessions.get(epoch)) is not None:
            session.num_sent += isinstance(message, Submit | Leg)
            session.send(message)

    def sent(self, leg: AttemptLeg, now_s: float) -> None:
        """Notes that a leg was just sent to its worker."""
        self._dispatcher.sent(leg, now_s)
        if (session := self._sessions.get(leg.epoch)) is not None:
            session.unseen.append((session.num_sent, leg.reservation))

    def report(self, epoch: int, report: Report) -> None:
        session = self._sessions[epoch]
        while session.unseen and session.unseen[0][0] <= report.num_seen:
            self._router.seen(session.unseen.popleft()[1])
        for home, tokens in zip(session.member.homes, report.tokens, strict=True):
            self._router.report(home, tokens)
        load = MemberLoad(queued_tokens=report.queued_tokens, num_running=report.num_running)
        self._dispatcher.fleet.report(session.member.address, load)

    def news(self, epoch: int, news: News) -> None:
        session = self._sessions[epoch]
        homes, events = session.prefixes.homes, news.events
        changes = [PrefixChange(homes[event.partition], event.name, event.is_known) for event in events]
        assert session.prefixes.events(epoch, events[0].number, changes), "there is a gap in what was told"
