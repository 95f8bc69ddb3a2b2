"""Whoever listens to a worker's feed knows what its cache knows, however late they listen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.kv.blocks import BlockPool
from moonshard.kv.prefix import Below, PrefixCache, block_names, root_name, split_names
from moonshard.rpc import link_pb2
from moonshard.serving.control.routing.prefix_index import PrefixChange, PrefixIndex, PrefixSubscriber
from moonshard.serving.worker import prefix_feed
from moonshard.serving.worker.prefix_feed import PrefixFeed

SIZE, EPOCH = 4, 7


class Listener:
    """A gateway's end."""

    def __init__(self, num_partitions: int):
        self.index = PrefixIndex()
        self.heard = PrefixSubscriber(self.index, homes=tuple(range(num_partitions)))

    def take(self, message: link_pb2.WorkerMessage) -> None:
        if message.WhichOneof("message") == "prefix_snapshot":
            snapshot = message.prefix_snapshot
            names = [(home, name) for home, joined in enumerate(snapshot.names) for name in split_names(joined)]
            parts = {"goes_on": snapshot.goes_on, "has_more": snapshot.has_more}
            self.heard.snapshot(EPOCH, snapshot.next_number, names, **parts)
            assert len(names) <= prefix_feed.MAX_NAMES_AT_ONCE
        else:
            events = message.prefix_events
            rows = zip(events.partitions, split_names(events.names), events.is_known, strict=True)
            assert self.heard.events(EPOCH, events.first_number, [PrefixChange(*row) for row in rows])


def run(cache: PrefixCache, pool: BlockPool, partition: int, tokens: list[int]) -> None:
    """A sequence that comes, is computed and goes."""
    names = block_names(root_name(b""), tokens, SIZE)
    found = cache.match(partition, names)
    cache.hold(partition, found)
    own = pool.allocate(partition, len(names) - len(found))
    for block, name in zip(own or (), names[len(found) :], strict=False):
        cache.note(partition, block, name)
    pool.release(partition, ((*found, *(own or ())))[::-1])


@pytest.mark.parametrize("max_names", [1, 3, 1000])
@pytest.mark.parametrize("max_events", [2, 1000])
@given(
    prompts=st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 1), max_size=20)), max_size=12),
    listens=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_a_listener_knows_what_the_cache_knows(max_events: int, max_names: int, prompts, listens):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moonshard.kv.prefix.MAX_EVENTS", max_events)
        patch.setattr("moonshard.kv.prefix.MAX_BELOW", 5)
        patch.setattr(prefix_feed, "MAX_EVENTS_AT_ONCE", 3)
        patch.setattr(prefix_feed, "MAX_NAMES_AT_ONCE", max_names)
        pool = BlockPool(2, 6, SIZE)
        cache = PrefixCache(pool, num_processes=2)
        listener = Listener(len(cache.spaces))
        feed = PrefixFeed(cache)
        assert feed.news() is None  # nobody asked
        listener.take(feed.snapshot())
        for (partition, tokens), is_listening in zip(prompts, listens, strict=False):
            run(cache, pool, partition, tokens)
            names = block_names(root_name(b""), tokens, SIZE)
            below = Below.SHARED if len(tokens) % 2 else Below.OWN
            cache.note_below(below, names, is_known=len(tokens) % 3 > 0, process=partition)
            while is_listening and (news := feed.news()) is not None:
                listener.take(news)
        while (news := feed.news()) is not None:
            listener.take(news)
        for space in range(len(cache.spaces)):
            assert listener.index.known(space) == set(cache.snapshot(space))
            assert space < 2 or len(cache.snapshot(space)) <= 5


def test_what_is_much_is_told_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefix_feed, "MAX_NAMES_AT_ONCE", 2)
    cache = PrefixCache(BlockPool(1, 6, SIZE))
    cache.note_below(Below.OWN, block_names(root_name(b""), range(5 * SIZE), SIZE))
    feed, listener = PrefixFeed(cache), Listener(len(cache.spaces))
    listener.take(feed.snapshot())
    told = [feed.is_telling_all]
    while (news := feed.news()) is not None:
        listener.take(news)
        told.append(feed.is_telling_all)
    assert told == [True, True, False]
    assert len(listener.index) == 5
