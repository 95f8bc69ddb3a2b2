"""Where the installed `moonshard` begins, and what Ctrl-C does before there is anything to end in order."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """Ctrl-C ends the process within the block, quietly and at once, as the system's own handler does.

    Python's raises an exception wherever the main thread is: amid imports some code swallows it, and C extensions turn
    it into errors of their own. Does nothing off the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def main() -> int:
    """The exit code. Ctrl-C ends the process until a command runs, which then has Python's own handler again."""
    with ended_by_interrupt():
        from moonshard.serving.cli import main as command_line

        return command_line()
