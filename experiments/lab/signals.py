"""What SIGINT and SIGTERM do to a run: the first of them ends it in order, and what says so is not disturbed.

Python makes of SIGINT a KeyboardInterrupt wherever the program is, and lets SIGTERM end it without a word. Both are for
the main thread.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def terminated_as_interrupted() -> Iterator[Callable[[], int]]:
    """SIGTERM ends the block as Ctrl-C does: with KeyboardInterrupt.

    What it gives tells the exit code that shells expect then: 130, or 143 where SIGTERM came.
    """
    number = signal.SIGINT

    def interrupt(*_: object) -> None:
        nonlocal number
        number = signal.SIGTERM
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)  # to whoever handles it, which may be an event loop

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield lambda: 128 + number
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def ignored() -> Iterator[None]:
    """For the last words of what a signal has ended already."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def held() -> Iterator[None]:
    """What comes during the block, which takes milliseconds, is raised when it is over."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(came):
            signal.raise_signal(number)
