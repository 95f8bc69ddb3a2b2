"""Grammars compiled on a thread of their own: who needs one that is not there yet waits, and nobody else.

The model's tokenizer is read with the first one, or ahead of it: a worker whose requests have none needs no tokenizer.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import final

from moonshard.serving.constrained.grammars import GrammarError, Grammars


@final
class Compiling:
    """The grammars of one worker. `load`: see `grammars.load_grammars`; called once, on the thread."""

    def __init__(self, load: Callable[[], Grammars]):
        self._load = load
        self._found: Grammars | GrammarError | None = None
        self._thread: ThreadPoolExecutor | None = None

    def has(self, grammar: str) -> bool:
        """Whether it is compiled, or was found to be faulty."""
        found = self._found
        return isinstance(found, GrammarError) or (found is not None and found.has(grammar))

    def grammars(self) -> Grammars:
        """Those of the model. Raises GrammarError where it has none; reads its tokenizer where nothing was compiled."""
        if self._found is None:
            try:
                self._found = self._load()
            except GrammarError as error:
                self._found = error
        if isinstance(self._found, GrammarError):
            raise GrammarError(str(self._found))
        return self._found

    def read_ahead(self) -> None:
        """Begins to read the model's tokenizer. Where there is none, whoever compiles a grammar is told."""
        self._executor.submit(self.grammars)

    async def compile(self, grammar: str) -> None:
        """Until it is there. Raises GrammarError."""
        await asyncio.get_running_loop().run_in_executor(self._executor, self._compile, grammar)

    @property
    def _executor(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammars")
        return self._thread

    def _compile(self, grammar: str) -> None:
        self.grammars().prepare(grammar)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
