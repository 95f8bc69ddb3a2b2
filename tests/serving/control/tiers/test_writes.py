"""What goes down is what became known, in its order, at most so much of it, and nothing that is gone."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from moonshard.kv.prefix import PrefixEvent
from moonshard.serving.control.tiers.writes import AGAIN_S, MAX_AGAIN_S, Piece, WriteQueue

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
            piece = queue.take(number, 0.0)
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


def fill(queue: WriteQueue, *numbers: int) -> Piece:
    queue.note([known(0, number) for number in numbers])
    piece = queue.take(len(numbers), 0.0)
    assert piece is not None
    return piece


def test_what_failed_is_tried_again_after_a_while_and_the_rest_at_once_where_that_went_well():
    queue = WriteQueue(MAX_BLOCKS, 2)
    queue.wrote(fill(queue, 1, 2, 3), {named(1), named(2), named(3)}, now_s=0.0)
    assert queue.take(2, AGAIN_S - 0.1) is None
    again = queue.take(2, AGAIN_S)
    assert again == Piece(partition=0, names=(named(1), named(2)), parents=(None, None), is_again=True)
    assert again
    queue.wrote(again, (), AGAIN_S)
    assert queue.take(2, AGAIN_S) == Piece(partition=0, names=(named(3),), parents=(None,), is_again=True)


def test_pauses_double_up_to_a_limit_and_begin_anew_once_something_is_kept():
    queue, now_s, pauses = WriteQueue(MAX_BLOCKS, 2), 0.0, list[float]()
    queue.wrote(fill(queue, 1), {named(1)}, now_s)
    for _ in range(6):
        pauses.append(queue._again_at_s - now_s)
        now_s = queue._again_at_s
        again = queue.take(1, now_s)
        assert again is not None
        queue.wrote(again, {named(1)}, now_s)
    assert pauses == [AGAIN_S, AGAIN_S, 2 * AGAIN_S, 4 * AGAIN_S, 8 * AGAIN_S, MAX_AGAIN_S]
    queue.wrote(fill(queue, 2), (), now_s)
    again = queue.take(1, now_s + AGAIN_S)
    assert again is not None
    queue.wrote(again, again.names, now_s)
    assert queue._again_at_s == now_s + AGAIN_S


def test_of_what_failed_no_more_is_remembered_than_a_queue_may_hold_and_nothing_that_is_gone():
    queue = WriteQueue(MAX_BLOCKS, 2)
    for number in range(10):
        queue.wrote(fill(queue, number), {named(number)}, 0.0)
    assert (queue.num_aside, queue.num_dropped) == (MAX_BLOCKS, 10 - MAX_BLOCKS)
    queue.note([gone(0, number) for number in range(10)])
    assert (queue.num_aside, queue.num_lost) == (0, MAX_BLOCKS)
    assert queue.take(1, 1e9) is None


def test_a_piece_that_is_tried_again_is_of_one_partition():
    queue = WriteQueue(MAX_BLOCKS, 2)
    queue.note([known(0, 1), known(1, 2), known(0, 3)])
    for _ in range(3):
        piece = queue.take(1, 0.0)
        assert piece is not None
        queue.wrote(piece, piece.names, 0.0)
    first, second = queue.take(9, AGAIN_S), queue.take(9, AGAIN_S)
    assert first == Piece(partition=0, names=(named(1), named(3)), parents=(None, None), is_again=True)
    assert second == Piece(partition=1, names=(named(2),), parents=(None,), is_again=True)
