"""A worker's open links: each message of a gateway finds the role's verb for it, and each output finds its link.

Knows nothing of gRPC streams, which are `link_service`'s.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moonshard.rpc import link_pb2
from moonshard.rpc.status import InvalidArgument, NotFound, RequestError, Unavailable
from moonshard.serving.control.batching.queue import Rejected
from moonshard.serving.wire import requests as wire
from moonshard.serving.wire.handoffs import epoch_from
from moonshard.serving.wire.link import Link, request_id_of
from moonshard.serving.worker.prefix_feed import PrefixFeed
from moonshard.serving.worker.roles.compiled_first import CompiledFirst
from moonshard.serving.worker.roles.held import Holder
from moonshard.serving.worker.roles.role import Outputs, Role
from moonshard.serving.worker.spans import WorkerSpans
from moonshard.serving.worker.store.store import WorkerStore

MAX_REFUSAL_CHARS = 256  # of what a gateway says that the log repeats

logger = logging.getLogger(__name__)


class LinkFault(InvalidArgument):
    """A message that no gateway sends and that is about no request: the link ends with it."""


@dataclass(slots=True)
class _Open:
    """What is kept of an open link."""

    feed: PrefixFeed
    num_seen: int = 0  # Run and Reserve messages


class Links:
    """The open links of a worker. `new_feed` makes what tells one link of the prefix cache."""

    def __init__(
        self,
        role: Role,
        spans: WorkerSpans,
        new_feed: Callable[[], PrefixFeed],
        compiled_first: CompiledFirst,
        store: WorkerStore | None,
    ):
        self._role = role
        self._compiled_first = compiled_first
        self._store = store
        self._holders: tuple[Holder, ...] = (compiled_first,) if store is None else (compiled_first, store)
        self._spans = spans
        self._new_feed = new_feed
        self._open: dict[Link, _Open] = {}
        self._refusal: str | None = None  # the last one
        self.were_there = False  # at any time

    def __iter__(self) -> Iterator[Link]:
        return iter(self._open)

    def open(self, link: Link) -> None:
        self._open[link] = _Open(self._new_feed())
        self.were_there = True

    def close(self, link: Link) -> None:
        self._open.pop(link, None)
        for holder in self._holders:
            holder.close_link(link)

    def num_seen(self, link: Link) -> int:
        """How many Run and Reserve messages came over the link."""
        return self._open[link].num_seen

    def receive(self, message: link_pb2.GatewayMessage, link: Link) -> None:
        """Do what a gateway's message says, or end the request that it names with an error.

        Raises:
            InvalidArgument: no gateway sends such a message, or it is about no request that could be answered.
        """
        request_id = request_id_of(message)
        self._answered(message, request_id, link, lambda: self._do(message, request_id, link))

    def _answered(
        self, message: link_pb2.GatewayMessage, request_id: bytes, link: Link, do: Callable[[], None]
    ) -> None:
        try:
            do()
        except LinkFault:
            raise
        except Rejected as error:
            self._turn_down(request_id, wire.rejection(error), link)
        except RequestError as error:
            if not isinstance(error, InvalidArgument | NotFound | Unavailable):
                logger.warning("%s: %s", message.WhichOneof("message"), error.message)
            self._turn_down(request_id, error, link)

    def _begin(
        self,
        message: link_pb2.GatewayMessage,
        run: link_pb2.Run,
        link: Link,
        begin: Callable[[], None],
        store: WorkerStore | None = None,
    ) -> None:
        """A request begins, once its grammar is compiled and what `store` has of its prompt has come up."""

        def begin_at_last() -> None:
            self._answered(message, run.request_id, link, begin)

        def begin_late() -> None:
            if store is None:
                begin_at_last()
            else:
                store.begin(run, link, begin_at_last)

        self._open[link].num_seen += 1
        self._compiled_first.begin(run.request_id, run.grammar, link, begin_late)

    def _do(self, message: link_pb2.GatewayMessage, request_id: bytes, link: Link) -> None:
        role = self._role
        match message.WhichOneof("message"):
            case "run":
                run = role.run_for if message.run.HasField("target") else role.run
                self._begin(message, message.run, link, lambda: run(message.run, link), self._store)
            case "reserve":
                self._begin(message, message.reserve.run, link, lambda: role.reserve(message.reserve, link))
            case "landed":
                role.landed(message.landed, link)
            case "start":
                role.start(message.start, link)
            case "drained":
                role.drained(message.drained, link)
            case "credits":
                role.credits(message.credits, link)
            case "cancel":
                self._drop(request_id, link)
                role.cancel(request_id, _target_epoch(message.cancel), link)
            case "tell_prefixes":
                link.send(self._open[link].feed.snapshot())
            case "refused":
                self._refused(message.refused.message)
            case _:
                raise LinkFault("hello was said, or nothing that this worker knows", field="message")

    def _turn_down(self, request_id: bytes, error: RequestError, link: Link) -> None:
        """A malformed message about a request ends the request: no output follows."""
        self._spans.end(request_id, error.code.name.lower())
        if isinstance(error, InvalidArgument):
            self._drop(request_id, link)
            self._role.give_up(request_id, link)
        link.send(wire.failed(request_id, error))

    def _drop(self, request_id: bytes, link: Link) -> None:
        """The request is not begun any more, if it was not yet."""
        for holder in self._holders:
            holder.drop(request_id, link)

    def _refused(self, reason: str) -> None:
        """Log why a gateway does not route here: once, since it asks again every second."""
        reason = "".join(char if char.isprintable() else " " for char in reason[:MAX_REFUSAL_CHARS])
        if reason != self._refusal:
            logger.warning("a gateway refuses this worker: %s", reason)
        self._refusal = reason

    def send_outputs(self, step: int, by_link: Outputs, load: link_pb2.WorkerLoad) -> None:
        """One message per link, whatever the number of its requests."""
        for link, outputs in by_link.items():
            message = link_pb2.WorkerMessage()  # filled in place: a message that is given another one copies it
            told = message.step
            told.step = step
            told.outputs.extend(outputs)
            load.num_seen = self._open[link].num_seen
            told.load.CopyFrom(load)
            link.send(message)

    def tell_prefixes(self) -> None:
        """Called at intervals and not with every step: what a router knows may be that old."""
        for link, known in self._open.items():
            while (news := known.feed.news()) is not None:
                link.send(news)
                if known.feed.is_telling_all:
                    break


def _target_epoch(cancel: link_pb2.Cancel) -> int:
    """0 where the cancel names none, as for a request that is no handoff. LinkFault for a malformed one, since a cancel
    is not answered.
    """
    try:
        return epoch_from(cancel.target_epoch, "target_epoch") if cancel.target_epoch else 0
    except InvalidArgument as error:
        raise LinkFault(error.message, field=error.field) from error
