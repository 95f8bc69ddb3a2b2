"""Which earlier conversation a prompt continues."""

from moonshard.serving.control.routing.conversations import Conversations, LastTurn

A, B, C, D = b"a", b"b", b"c", b"d"


def home_of(turn: LastTurn | None) -> int | None:
    return None if turn is None else turn.home


def test_a_prompt_goes_on_the_longest_one_that_it_begins_with():
    conversations = Conversations()
    conversations.put(None, [A], 1, 0.0)
    conversations.put(None, [A, B, C], 2, 1.0)
    assert home_of(conversations.take(None, [A, B, C, D])) == 2
    assert home_of(conversations.take(None, [A, B, C, D])) == 1  # the other was taken
    assert conversations.take(None, [A, B, C, D]) is None


def test_a_prompt_that_parts_earlier_begins_a_conversation():
    conversations = Conversations()
    conversations.put(None, [A, B], 1, 0.0)
    assert conversations.take(None, [A, C, D]) is None
    assert conversations.take(None, [A]) is None
    assert len(conversations) == 1


def test_first_prompts_that_are_alike_are_as_many_conversations():
    """A system prompt, and first messages that end in the block after it."""
    conversations = Conversations()
    for home in range(3):
        assert conversations.take(None, [A, B]) is None
        conversations.put(None, [A, B], home, 0.0)
    assert len(conversations) == 3
    assert {home_of(conversations.take(None, [A, B, C])) for _ in range(3)} == {0, 1, 2}
    assert conversations.take(None, [A, B, C]) is None


def test_a_session_is_its_own_conversation_whatever_it_says():
    conversations = Conversations()
    assert conversations.put(b"session", [A, B], 1, 0.0)
    assert conversations.take(None, [A, B, C]) is None
    assert conversations.take(b"another", [A, B, C]) is None
    assert home_of(conversations.take(b"session", [D])) == 1


def test_what_cannot_be_told_from_others_is_not_kept():
    conversations = Conversations()
    assert conversations.put(None, [], 1, 0.0) is None
    assert conversations.take(None, []) is None
    assert len(conversations) == 0


def test_the_one_without_a_turn_for_longest_makes_room():
    conversations = Conversations(max_conversations=2)
    for home, name in enumerate((A, B, B, C)):
        conversations.take(None, [name, D])
        conversations.put(None, [name], home, 0.0)
    assert [home_of(conversations.take(None, [name, D])) for name in (A, B, C)] == [None, 2, 3]


def test_the_oldest_of_those_alike_makes_room_first():
    conversations = Conversations(max_conversations=2)
    for home in range(4):
        conversations.put(None, [A], home, 0.0)
    assert len(conversations) == 2
    assert [home_of(conversations.take(None, [A, B])) for _ in range(3)] == [3, 2, None]


def test_a_turn_is_dropped_once_and_only_itself():
    conversations = Conversations()
    first, second = (conversations.put(None, [A], home, 0.0) for home in (1, 2))
    assert first is not None
    assert conversations.drop(first)
    assert not conversations.drop(first)
    assert conversations.take(None, [A, B]) is second
    assert len(conversations) == 0


def test_a_turn_that_was_taken_can_come_back():
    conversations = Conversations()
    turn = conversations.put(b"session", [], 1, 0.0)
    assert turn is not None
    assert conversations.take(b"session", []) is turn
    conversations.put_back(turn)
    assert conversations.take(b"session", []) is turn
