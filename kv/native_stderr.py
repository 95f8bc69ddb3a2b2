"""Filters known harmless lines out of what native code writes to stderr.

Only the file descriptor can be redirected, and that for the whole process: whatever else is written to it meanwhile is
written out afterwards.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence

STDERR = 2


@contextlib.contextmanager
def stderr_without(known: Sequence[str]) -> Iterator[None]:
    """Holds back stderr inside the block, then writes it without the lines that contain one of `known`.

    Where the block raises, all of it is written.
    """
    try:
        original = os.dup(STDERR)
    except OSError:  # there is none
        yield
        return
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), STDERR)
        hidden: Sequence[str] = ()
        try:
            yield
            hidden = known
        finally:
            os.dup2(original, STDERR)
            os.close(original)
            kept.seek(0)
            _tell(kept.read(), [text.encode() for text in hidden])


def _tell(output: bytes, hidden: Sequence[bytes]) -> None:
    shown = b"".join(line for line in output.splitlines(keepends=True) if not any(text in line for text in hidden))
    with contextlib.suppress(OSError):  # no room, or nobody there
        if shown:
            os.write(STDERR, shown)
