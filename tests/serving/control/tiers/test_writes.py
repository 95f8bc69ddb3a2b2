"""What goes down is what became known, in its order, at most so much of it, and nothing that is gone."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from moonshard.kv.prefix import PrefixEvent
from moonshard.serving.control.tiers.aside import AGAIN_S, MAX_AGAIN_S
from moonshard.serving.control.tiers.piece import Piece
from moonshard.serving.control.tiers.writes import WriteQueue

MAX_BLOCKS = 4
TIERS = ("host", "ssd")


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
    queue = WriteQueue(MAX_BLOCKS, range(2), TIERS)
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
    queue = WriteQueue(MAX_BLOCKS, range(2), TIERS)
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
    assert piece.again_for is None
    return piece


def told(piece: Piece, *lacking: str) -> dict[str, tuple[bytes, ...]]:
    """What the tiers say that were to keep it: all of it, or nothing."""
    tiers = TIERS if piece.again_for is None else (piece.again_for,)
    return {tier: () if tier in lacking else piece.names for tier in tiers}


def again(queue: WriteQueue, max_blocks: int, now_s: float) -> Piece:
    piece = queue.take(max_blocks, now_s)
    assert piece is not None
    assert piece.again_for is not None
    return piece


def test_what_failed_is_tried_again_after_a_while_and_the_rest_at_once_where_that_went_well():
    queue = WriteQueue(MAX_BLOCKS, range(2), TIERS)
    piece = fill(queue, 1, 2, 3)
    queue.wrote(piece, told(piece, "ssd"), now_s=0.0)
    assert queue.take(2, AGAIN_S - 0.1) is None
    piece = again(queue, 2, AGAIN_S)
    assert piece == Piece(partition=0, names=(named(1), named(2)), parents=(None, None), again_for="ssd")
    queue.wrote(piece, told(piece), AGAIN_S)
    rest = Piece(partition=0, names=(named(3),), parents=(None,), again_for="ssd")
    assert queue.take(2, AGAIN_S) == rest


def test_of_a_piece_only_what_a_tier_did_not_keep_is_tried_again():
    queue = WriteQueue(MAX_BLOCKS, range(2), TIERS)
    piece = fill(queue, 1, 2, 3)
    queue.wrote(piece, {"host": (named(1), named(3)), "ssd": piece.names}, 0.0)
    assert again(queue, 9, AGAIN_S).names == (named(2),)
    assert queue.num_aside == 0


def test_pauses_double_up_to_a_limit_and_begin_anew_once_something_is_kept():
    queue, now_s, pauses = WriteQueue(MAX_BLOCKS, range(2), TIERS), 0.0, list[float]()
    piece = fill(queue, 1)
    queue.wrote(piece, told(piece, "host"), now_s)
    for _ in range(6):
        at_s = queue._aside["host"]._again_at_s
        pauses.append(at_s - now_s)
        now_s = at_s
        piece = again(queue, 1, now_s)
        queue.wrote(piece, told(piece, "host"), now_s)
    assert pauses == [AGAIN_S, AGAIN_S, 2 * AGAIN_S, 4 * AGAIN_S, 8 * AGAIN_S, MAX_AGAIN_S]
    piece = fill(queue, 2)
    queue.wrote(piece, told(piece), now_s)
    piece = again(queue, 1, now_s + AGAIN_S)
    queue.wrote(piece, told(piece, "host"), now_s)
    assert queue._aside["host"]._again_at_s == now_s + AGAIN_S


def test_a_tier_that_is_off_for_good_delays_no_other():
    queue, now_s = WriteQueue(MAX_BLOCKS, range(2), TIERS), 0.0
    piece = fill(queue, 1)
    queue.wrote(piece, told(piece, "ssd"), now_s)
    for _ in range(6):
        now_s = queue._aside["ssd"]._again_at_s
        piece = again(queue, 1, now_s)
        queue.wrote(piece, told(piece, "ssd"), now_s)
    piece = fill(queue, 2)
    queue.wrote(piece, told(piece, "host", "ssd"), now_s)
    assert again(queue, 9, now_s + AGAIN_S).again_for == "host"
    assert queue.take(9, now_s + AGAIN_S) is None


def test_of_what_failed_no_more_is_remembered_than_a_queue_may_hold_and_nothing_that_is_gone():
    queue = WriteQueue(MAX_BLOCKS, range(2), TIERS)
    for number in range(10):
        piece = fill(queue, number)
        queue.wrote(piece, told(piece, "ssd"), 0.0)
    assert queue.num_aside == MAX_BLOCKS
    queue.note([gone(0, number) for number in range(10)])
    assert (queue.num_aside, queue.num_lost, queue.num_dropped) == (0, 0, 0)  # the other tier has them
    assert queue.take(1, 1e9) is None


def test_a_piece_that_is_tried_again_is_of_one_partition():
    queue = WriteQueue(MAX_BLOCKS, range(2), TIERS)
    queue.note([known(0, 1), known(1, 2), known(0, 3)])
    for _ in range(3):
        piece = queue.take(1, 0.0)
        assert piece is not None
        queue.wrote(piece, told(piece, "ssd"), 0.0)
    first, second = again(queue, 9, AGAIN_S), again(queue, 9, AGAIN_S)
    assert (first.partition, first.names) == (0, (named(1), named(3)))
    assert (second.partition, second.names) == (1, (named(2),))


def set_aside(queue: WriteQueue, *numbers: int) -> None:
    piece = Piece(partition=0, names=tuple(map(named, numbers)), parents=(None,) * len(numbers))
    queue.found_lacking("host", piece, 0.0)


def turns(queue: WriteQueue, number: int) -> str:
    pieces = [queue.take(1, 0.0) for _ in range(number)]
    return "".join("-" if piece is None else "a" if piece.again_for else "n" for piece in pieces)


def test_what_was_set_aside_takes_turns_with_what_is_new():
    queue = WriteQueue(100, range(1), TIERS)
    set_aside(queue, *range(10, 16))
    queue.note([known(0, number) for number in range(3)])
    assert turns(queue, 10) == "nananaaaa-"


def test_where_much_is_new_what_was_set_aside_waits():
    queue = WriteQueue(16, range(1), TIERS)
    set_aside(queue, 10, 11)
    queue.note([known(0, number) for number in range(5)])
    assert turns(queue, 8) == "nnnanan-"  # two are not many


def test_at_the_end_what_no_tier_has_goes_first_and_the_rest_whenever_it_was_to_be():
    queue = WriteQueue(100, range(1), TIERS)
    piece = fill(queue, 10, 11)
    queue.wrote(piece, told(piece, "host", "ssd"), 0.0)
    queue.note([known(0, number) for number in range(3)])
    last = [queue.take_last(2) for _ in range(5)]
    assert [each and (len(each.names), each.again_for) for each in last] == [
        (2, None),
        (1, None),
        (2, "host"),
        (2, "ssd"),
        None,
    ]


def test_what_waits_to_be_written_is_not_lost():
    queue = WriteQueue(MAX_BLOCKS, range(2), TIERS)
    queue.note([known(0, 1), known(1, 2)])
    set_aside(queue, 1, 2)
    assert queue.num_aside == 1  # of the other partition
    assert turns(queue, 4) == "nna-"


def test_what_a_tier_has_lost_is_given_to_it_at_once_unless_it_fails():
    queue = WriteQueue(MAX_BLOCKS, range(1), TIERS)
    set_aside(queue, 1)
    assert again(queue, 1, 0.0).names == (named(1),)
    piece = fill(queue, 2)
    queue.wrote(piece, told(piece, "host"), 0.0)
    set_aside(queue, 3)
    assert queue.take(1, AGAIN_S - 0.1) is None
    assert again(queue, 9, AGAIN_S).names == (named(2), named(3))
