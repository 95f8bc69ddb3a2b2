"""What a worker tells each gateway of its prefix cache: all there is when asked, and from then on what changes.

One per link. Events are numbered by the cache, for all links alike; a link that lags further than the cache remembers
is told everything again. A gateway keeps it in `routing.prefix_index`.
"""

from moonshard.kv.prefix import PrefixCache
from moonshard.rpc import link_pb2

MAX_EVENTS_AT_ONCE = 4096  # in a message


class PrefixFeed:
    def __init__(self, cache: PrefixCache):
        self._cache = cache
        self._next: int | None = None  # of the event that this link has not heard; None: it has not asked

    def snapshot(self) -> link_pb2.WorkerMessage:
        """All that the cache knows now; later changes are in `news`."""
        self._next = self._cache.num_events
        names = [b"".join(self._cache.snapshot(space)) for space in range(len(self._cache.spaces))]
        return link_pb2.WorkerMessage(prefix_snapshot=link_pb2.PrefixSnapshot(next_number=self._next, names=names))

    def news(self) -> link_pb2.WorkerMessage | None:
        """What changed since the last message; None where nothing changed, or where no snapshot was asked for."""
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
