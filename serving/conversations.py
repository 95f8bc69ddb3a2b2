"""Which prompt goes on which earlier one, and where that was sent: so that a router can count who will come again.

Agents resend their whole context, and come back to where it is known. So a conversation is more than its first prompt:
the home that gets it gets its later turns too, and holds its growing context. It is known by its session, or without
one by the name of the last full block of its last prompt, which the next prompt goes on from. Bounded, and pure.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

MAX_CONVERSATIONS = 100_000


@dataclass(frozen=True, slots=True)
class Turn:
    """The last one of a conversation: the number of the home that it was given to, and when."""

    home: int
    given_s: float


class Conversations:
    """The last turn of each, the one that is longest ago first."""

    def __init__(self, max_conversations: int = MAX_CONVERSATIONS) -> None:
        self._max_conversations = max_conversations
        self._turns: OrderedDict[bytes, Turn] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    def take(self, session: bytes | None, names: Sequence[bytes]) -> Turn | None:
        """The turn before a prompt with these blocks, no longer kept here; None where it is the first.

        Of several that it could go on from the one with the longest prompt.
        """
        if session is not None:
            return self._turns.pop(session, None)
        name = next((name for name in reversed(names) if name in self._turns), None)
        return None if name is None else self._turns.pop(name)

    def put(self, session: bytes | None, names: Sequence[bytes], turn: Turn) -> bool:
        """Whether it can be told from others: without a session and a full block it cannot, and nothing is kept."""
        key = session if session is not None else names[-1] if names else None
        if key is None:
            return False
        self._turns[key] = turn
        self._turns.move_to_end(key)
        if len(self._turns) > self._max_conversations:
            self._turns.popitem(last=False)
        return True
