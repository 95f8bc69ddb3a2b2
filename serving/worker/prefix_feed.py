"""What a worker tells each gateway of its prefix cache: all there is when asked, and from then on what changes.

One per link. Events are numbered by the cache, for all links alike; a link that lags further than the cache remembers
is told everything again. A gateway keeps it in `routing.prefix_index`.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from moonshard.kv.prefix import BlockName, PrefixCache
from moonshard.rpc import link_pb2

MAX_EVENTS_AT_ONCE = 4096  # in a message
MAX_NAMES_AT_ONCE = 65_536  # in a part of a snapshot: 1 MiB of them


class PrefixFeed:
    def __init__(self, cache: PrefixCache):
        self._cache = cache
        self._next: int | None = None  # of the event that this link has not heard; None: it has not asked
        self._parts = deque[link_pb2.PrefixSnapshot]()  # of a snapshot, that are still to be told

    @property
    def is_telling_all(self) -> bool:
        """Whether parts of a snapshot are still to be told: one at a time, since a link takes only so much at once."""
        return bool(self._parts)

    def snapshot(self) -> link_pb2.WorkerMessage:
        """All that the cache knows now, or the first part of it; what is behind that is in `news`."""
        self._next = self._cache.num_events
        names = [self._cache.snapshot(space) for space in range(len(self._cache.spaces))]
        self._parts = deque(link_pb2.PrefixSnapshot(next_number=self._next, names=part) for part in _parts(names))
        for part in self._parts:
            part.goes_on, part.has_more = part is not self._parts[0], part is not self._parts[-1]
        return link_pb2.WorkerMessage(prefix_snapshot=self._parts.popleft())

    def news(self) -> link_pb2.WorkerMessage | None:
        """What changed since the last message; None where nothing changed, or where no snapshot was asked for."""
        if self._parts:
            return link_pb2.WorkerMessage(prefix_snapshot=self._parts.popleft())
        if self._next is None or self._next == self._cache.num_events:
            return None
        events = self._cache.events_from(self._next)
        if events is None:
            return self.snapshot()
        first, events = self._next, events[:MAX_EVENTS_AT_ONCE]
        self._next += len(events)
        return link_pb2.WorkerMessage(
            prefix_events=link_pb2.PrefixEvents(
                first_number=first,
                names=b"".join(event.name for event in events),
                partitions=[event.partition for event in events],
                is_known=[event.is_known for event in events],
            )
        )


def _parts(names: Sequence[Sequence[BlockName]]) -> Iterable[list[bytes]]:
    """The names of all spaces, cut into parts of at most so many; there is at least one part."""
    parts, room = [[b""] * len(names)], MAX_NAMES_AT_ONCE
    for space, known in enumerate(names):
        start = 0
        while start < len(known):
            if not room:
                parts.append([b""] * len(names))
                room = MAX_NAMES_AT_ONCE
            taken = known[start : start + room]
            parts[-1][space] = b"".join(taken)
            start, room = start + len(taken), room - len(taken)
    return parts
