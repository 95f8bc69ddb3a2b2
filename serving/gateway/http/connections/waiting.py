"""Which connections of the HTTP front wait for their client, and which of them gives way where there are too many.

Half-open: its next request is not complete. Idle: between two requests. One whose request is being answered is neither,
and nothing here ends it. The oldest gives way, since honest clients finish what they begin, while whoever wants to hold
many connections holds them for long. Pure.
"""

from dataclasses import dataclass
from typing import Protocol


class Connection(Protocol):
    def give_way(self) -> None:
        """Closes the connection, since others need the room."""
        ...


class Waiting:
    """Connections in the order in which they came. The oldest is closed where one more would be too many."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._oldest_first: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._oldest_first)

    def add(self, connection: Connection) -> None:
        """Adds a connection; one that is there already keeps its place."""
        if connection not in self._oldest_first and len(self) >= self._max_connections:
            oldest = next(iter(self._oldest_first))
            del self._oldest_first[oldest]
            oldest.give_way()
        self._oldest_first[connection] = None

    def discard(self, connection: Connection) -> None:
        self._oldest_first.pop(connection, None)


@dataclass(frozen=True, slots=True)
class Connections:
    """The waiting connections of one HTTP port."""

    idle: Waiting
    half_open: Waiting
