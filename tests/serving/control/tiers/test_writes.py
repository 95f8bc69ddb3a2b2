"""What goes down is what became known, in its order, at most so much of it, and nothing that is gone."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from moonshard.kv.prefix import PrefixEvent
from moonshard.serving.control.tiers.writes import Piece, WriteQueue

MAX_BLOCKS = 4


def named(number: int) -> bytes:
    return number.to_bytes(16, "big")


def known(partition: int, number: int) -> PrefixEvent:
    return PrefixEvent(0, partition, named(number), is_known=True)


def gone(partition: int, number: int) -> PrefixEvent:
    return PrefixEvent(0, partition, named(number), is_known=False)


moves = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["known", "gone", "fetched"]), st.integers(0, 1), st.integers(0, 9)),
        st.tuples(st.just("take"), st.just(0), st.integers(1, 3)),
    ),
    max_size=60,
)


@given(moves)
def test_pieces_are_the_oldest_that_are_still_known(moves: list[tuple[str, int, int]]):
    """Against a list that is looked through from its beginning."""
    queue = WriteQueue(MAX_BLOCKS, 2)
    waiting = deque[tuple[int, bytes]]()
    num_dropped = num_lost = 0
    for move, partition, number in moves:
        key = partition, named(number)
        if move == "known":
            queue.note([known(partition, number)])
            if key not in waiting:
                num_dropped += len(waiting) == MAX_BLOCKS
                waiting += [key] if len(waiting) < MAX_BLOCKS else []
        elif move == "fetched":
            queue.note([known(partition, number)], {named(number)})
        elif move == "gone":
            queue.note([gone(partition, number)])
            num_lost += key in waiting
            if key in waiting:
                waiting.remove(key)
        else:
            expected = list[tuple[int, bytes]]()
            while waiting and len(expected) < number and waiting[0][0] == (expected or waiting)[0][0]:
                expected.append(waiting.popleft())
            piece = queue.take(number)
            found = [] if piece is None else [(piece.partition, name) for name in piece.names]
            assert found == expected
        assert len(queue) == len(waiting)
        assert (queue.num_dropped, queue.num_lost) == (num_dropped, num_lost)


def test_a_queue_that_nobody_empties_stays_small():
    queue = WriteQueue(MAX_BLOCKS, 2)
    for number in range(1000):
        queue.note([known(0, number), gone(0, number)])
    assert len(queue) == 0
    assert len(queue._queue) <= 2 * MAX_BLOCKS


def test_blocks_of_several_sequences_are_told_apart_by_what_is_before_them():
    a, b = [named(n) for n in (1, 2, 3)], [named(n) for n in (11, 12)]
    piece = Piece(partition=0, names=(a[0], a[1], b[0], a[2], b[1]), parents=(None, a[0], named(10), a[1], b[0]))
    chains = [piece.names[chain] for chain in piece.chains()]
    assert chains == [(a[0], a[1]), (b[0],), (a[2],), (b[1],)]
    assert piece.only({a[1], a[2]}).parents == (a[0], a[1])
    assert piece.only(()).chains() == []
