"""Requests that are not begun yet, because something of theirs is not there: until then nobody else knows of them.

A request that is cancelled, or whose link closes, while it is held is never begun. What it waits for, and for how long,
is its holder's to say: `compiled_first`, and `worker.store.fetching`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from moonshard.serving.wire.link import Link


@dataclass(eq=False, frozen=True, slots=True)
class Wait[T]:
    """One request's wait."""

    request_id: bytes
    link: Link
    what: T


class Holder(Protocol):
    """Whoever holds requests back."""

    def drop(self, request_id: bytes, link: Link) -> None:
        """The request is over, where it is held and came over this link."""
        ...

    def close_link(self, link: Link) -> None:
        """So are all that came over it."""
        ...


class Held[T]:
    """Iterates over the waits."""

    def __init__(self) -> None:
        self._waits: dict[bytes, Wait[T]] = {}

    def __len__(self) -> int:
        return len(self._waits)

    def __iter__(self) -> Iterator[Wait[T]]:
        return iter(self._waits.values())

    def get(self, request_id: bytes) -> Wait[T] | None:
        return self._waits.get(request_id)

    def hold(self, request_id: bytes, link: Link, what: T) -> Wait[T]:
        wait = self._waits[request_id] = Wait(request_id, link, what)
        return wait

    def is_over(self, wait: Wait[T]) -> bool:
        """Whether its request has ended; a later one may have its id."""
        return self._waits.get(wait.request_id) is not wait

    def let_go(self, wait: Wait[T]) -> bool:
        """Holds its request no longer. False where that is over."""
        if self.is_over(wait):
            return False
        del self._waits[wait.request_id]
        return True

    def drop(self, request_id: bytes, link: Link) -> None:
        if (wait := self.get(request_id)) is not None and wait.link is link:
            del self._waits[request_id]

    def close_link(self, link: Link) -> None:
        for wait in [each for each in self if each.link is link]:
            del self._waits[wait.request_id]
