"""Which prompt goes on which earlier one."""

from moonshard.serving.conversations import Conversations, Turn

A, B, C, D = b"a", b"b", b"c", b"d"


def test_a_prompt_goes_on_the_longest_one_that_it_begins_with():
    conversations = Conversations()
    conversations.put(None, [A], Turn(1, 0.0))
    conversations.put(None, [A, B, C], Turn(2, 1.0))
    assert conversations.take(None, [A, B, C, D]) == Turn(2, 1.0)
    assert conversations.take(None, [A, B, C, D]) == Turn(1, 0.0)  # the other was taken
    assert conversations.take(None, [A, B, C, D]) is None


def test_a_prompt_that_parts_earlier_begins_a_conversation():
    conversations = Conversations()
    conversations.put(None, [A, B], Turn(1, 0.0))
    assert conversations.take(None, [A, C]) is None
    assert conversations.take(None, [A]) is None
    assert len(conversations) == 1


def test_a_session_is_its_own_conversation_whatever_it_says():
    conversations = Conversations()
    assert conversations.put(b"session", [A, B], Turn(1, 0.0))
    assert conversations.take(None, [A, B, C]) is None
    assert conversations.take(b"another", [A, B, C]) is None
    assert conversations.take(b"session", [D]) == Turn(1, 0.0)


def test_what_cannot_be_told_from_others_is_not_kept():
    conversations = Conversations()
    assert not conversations.put(None, [], Turn(1, 0.0))
    assert len(conversations) == 0


def test_the_one_without_a_turn_for_longest_makes_room():
    conversations = Conversations(max_conversations=2)
    for number, name in enumerate((A, B, A, C)):
        conversations.put(None, [name], Turn(number, 0.0))
    assert [conversations.take(None, [name]) for name in (A, B, C)] == [Turn(2, 0.0), None, Turn(3, 0.0)]
