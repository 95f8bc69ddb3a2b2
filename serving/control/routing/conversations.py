"""Which prompt goes on which earlier one, and where that was sent: so that a router can count who will come again.

Agents resend their whole context, and come back to where it is known. So a conversation is more than its first prompt:
the home that gets it gets its later turns too, and holds its growing context. It is known by its affinity key, or
without one by the name of the last full block of its last prompt, which a longer prompt goes on from. First prompts
that are alike in all full blocks are conversations of their own, told from one another by nobody: which of them a
longer prompt goes on does not matter to how many there are. Bounded.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

MAX_CONVERSATIONS = 100_000


@dataclass(frozen=True, slots=True, eq=False)
class LastTurn:
    """The last turn of a conversation: the number of the home that it was given to, and when."""

    key: bytes
    home: int
    given_s: float


class Conversations:
    """The last turn of each conversation, in the order of their times, the oldest first."""

    def __init__(self, max_conversations: int = MAX_CONVERSATIONS) -> None:
        self._max_conversations = max_conversations
        self._turns: OrderedDict[bytes, list[LastTurn]] = OrderedDict()
        self._num_turns = 0

    def __len__(self) -> int:
        return self._num_turns

    def take(self, affinity_key: bytes | None, names: Sequence[bytes]) -> LastTurn | None:
        """Removes and returns the turn that a prompt with these blocks goes on from; None where the prompt begins a
        conversation.

        Where it could go on from several, the one with the longest prompt is taken, and of equals the last.
        """
        if affinity_key is not None:
            key = affinity_key if affinity_key in self._turns else None
        else:
            key = next((name for name in reversed(names[:-1]) if name in self._turns), None)
        return None if key is None else self._pop(key, -1)

    def put(self, affinity_key: bytes | None, names: Sequence[bytes], home: int, given_s: float) -> LastTurn | None:
        """Keeps a turn; returns what is kept. None where it cannot be told from others: it has neither a key nor a full
        block.
        """
        key = affinity_key if affinity_key is not None else names[-1] if names else None
        if key is None:
            return None
        turn = LastTurn(key, home, given_s)
        self.put_back(turn)
        return turn

    def put_back(self, turn: LastTurn) -> None:
        """Keeps a turn again that was taken, as the last one."""
        self._turns.setdefault(turn.key, []).append(turn)
        self._turns.move_to_end(turn.key)
        self._num_turns += 1
        if self._num_turns > self._max_conversations:
            oldest = next(iter(self._turns))
            self._pop(oldest, 0)

    def drop(self, turn: LastTurn) -> bool:
        """Removes a turn; says whether it was still there, since a later turn may have taken it."""
        turns = self._turns.get(turn.key, [])
        place = next((place for place in reversed(range(len(turns))) if turns[place] is turn), None)  # among the last
        if place is not None:
            self._pop(turn.key, place)
        return place is not None

    def forget(self, homes: Collection[int]) -> None:
        """These homes are no more: neither are the turns there. Takes a look at every turn."""
        for turn in [turn for turns in self._turns.values() for turn in turns if turn.home in homes]:
            self.drop(turn)

    def _pop(self, key: bytes, place: int) -> LastTurn:
        turns = self._turns[key]
        turn = turns.pop(place)
        if not turns:
            del self._turns[key]
        self._num_turns -= 1
        return turn
