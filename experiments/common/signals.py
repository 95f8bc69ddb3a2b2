"""What SIGINT and SIGTERM do to a run: the first of them ends it in order, and what says so is not disturbed.

Python raises KeyboardInterrupt wherever the program is, also in the middle of an event loop, whose tasks then end as if
they had failed; and SIGTERM ends it without a word. One that is ignored, as SIGINT is in the background of a script,
stays so. All of this is for the main thread.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """Raised where a signal of this number ended the run."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number

    @property
    def exit_code(self) -> int:
        """The exit code that shells use: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.number


@contextmanager
def interrupting() -> Iterator[None]:
    """Either signal ends the block with Interrupted. Later signals are ignored while the program ends."""
    with _handled(_interrupt) as before:
        try:
            yield
        except Interrupted:
            before.update(dict.fromkeys(before, signal.SIG_IGN))
            raise


@contextmanager
def held() -> Iterator[None]:
    """A signal that comes during the block, which takes milliseconds, is raised when the block is over."""
    came: list[int] = []
    with _handled(lambda number, _: came.append(number)):
        yield
    for number in dict.fromkeys(came):
        signal.raise_signal(number)


def run_interruptibly[T](main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, but the first signal cancels the task, later ones do nothing. Interrupted when it has ended."""
    came: list[int] = []
    cancel: Callable[[], object] | None = None

    async def run() -> T:
        nonlocal cancel
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None  # a coroutine runs in one
        cancel = lambda: loop.call_soon_threadsafe(task.cancel)  # noqa: E731  # a signal's handler calls it
        if came:
            task.cancel()
        try:
            return await main
        finally:
            cancel = None

    def end(number: int, _: FrameType | None) -> None:
        came.append(number)
        if cancel is not None and len(came) == 1:
            cancel()

    try:
        with _handled(end):
            return asyncio.run(run())
    finally:
        if came:  # whatever the task made of it
            raise Interrupted(came[0])


def _interrupt(number: int, _: FrameType | None) -> None:
    raise Interrupted(number)


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[dict[signal.Signals, Any]]:
    """Handles the signals inside the block; yields the handlers to set after it, at first those of before."""
    before = {
        number: signal.signal(number, handler) for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield before
    finally:
        for number, own in before.items():
            signal.signal(number, own)
