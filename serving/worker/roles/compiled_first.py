"""Requests whose grammar is not compiled yet: each waits for its own, and is begun as if it came then.

Nothing else of a request reaches a worker before the answer to the message that begins it, but its end: a request that
is cancelled, or whose link closes, while it waits is never begun.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from moonshard.rpc.status import InvalidArgument
from moonshard.serving.constrained.compiling import Compiling
from moonshard.serving.constrained.grammars import GrammarError
from moonshard.serving.wire.link import Link
from moonshard.serving.worker.background import Background


@final
class CompiledFirst:
    """The requests of all links that wait. On the event loop."""

    def __init__(self, compiling: Compiling, on_fault: Callable[[BaseException], None]):
        self._compiling = compiling
        self._waiting: dict[bytes, _Waiting] = {}
        self._background = Background(on_fault)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def begin(self, request_id: bytes, grammar: str, link: Link, begin: Callable[[], None]) -> None:
        """Calls `begin` once the grammar is compiled, or faulty, which whoever uses it notices: now, if it is there.

        A message that says the same again changes nothing. Raises InvalidArgument where a request of this id waits that
        came over another link.
        """
        if (waiting := self._waiting.get(request_id)) is not None:
            if waiting.link is not link:
                raise InvalidArgument("a request with this id waits for its grammar", field="request_id")
        elif not grammar or self._compiling.has(grammar):
            begin()
        else:
            waiting = self._waiting[request_id] = _Waiting(link)
            self._background.spawn(self._begin_later(request_id, waiting, grammar, begin))

    async def _begin_later(
        self, request_id: bytes, waiting: "_Waiting", grammar: str, begin: Callable[[], None]
    ) -> None:
        with contextlib.suppress(GrammarError):
            await self._compiling.compile(grammar)
        if self._waiting.get(request_id) is waiting:  # and not of a later one of its id
            del self._waiting[request_id]
            begin()

    def drop(self, request_id: bytes, link: Link) -> None:
        """The request is over, where it waits and came over this link."""
        if (waiting := self._waiting.get(request_id)) is not None and waiting.link is link:
            del self._waiting[request_id]

    def close_link(self, link: Link) -> None:
        for request_id in [each for each, waiting in self._waiting.items() if waiting.link is link]:
            del self._waiting[request_id]


@dataclass(eq=False, frozen=True, slots=True)
class _Waiting:
    """One request's wait."""

    link: Link
