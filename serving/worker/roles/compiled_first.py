"""Requests whose grammar is not compiled yet: each waits for its own, and is begun as if it came then.

Nothing else of a request reaches a worker before the answer to the message that begins it, but its end: a request that
is cancelled, or whose link closes, while it waits is never begun.
"""

import contextlib
from collections.abc import Callable
from typing import final

from moonshard.rpc.status import InvalidArgument
from moonshard.serving.constrained.compiling import Compiling
from moonshard.serving.constrained.grammars import GrammarError
from moonshard.serving.wire.link import Link
from moonshard.serving.worker.background import Background
from moonshard.serving.worker.roles.held import Held, Wait


@final
class CompiledFirst:
    """The requests of all links that wait. On the event loop."""

    def __init__(self, compiling: Compiling, on_fault: Callable[[BaseException], None]):
        self._compiling = compiling
        self._held = Held[None]()
        self._background = Background(on_fault)

    @property
    def num_waiting(self) -> int:
        return len(self._held)

    def begin(self, request_id: bytes, grammar: str, link: Link, begin: Callable[[], None]) -> None:
        """Calls `begin` once the grammar is compiled, or faulty, which whoever uses it notices: now, if it is there.

        A message that says the same again changes nothing. Raises InvalidArgument where a request of this id waits that
        came over another link.
        """
        if (wait := self._held.get(request_id)) is not None:
            if wait.link is not link:
                raise InvalidArgument("a request with this id waits for its grammar", field="request_id")
        elif not grammar or self._compiling.has(grammar):
            begin()
        else:
            wait = self._held.hold(request_id, link, None)
            self._background.spawn(self._begin_later(wait, grammar, begin))

    async def _begin_later(self, wait: Wait[None], grammar: str, begin: Callable[[], None]) -> None:
        with contextlib.suppress(GrammarError):
            await self._compiling.compile(grammar)
        if self._held.let_go(wait):
            begin()

    def drop(self, request_id: bytes, link: Link) -> None:
        """The request is over, where it waits and came over this link."""
        self._held.drop(request_id, link)

    def close_link(self, link: Link) -> None:
        self._held.close_link(link)
