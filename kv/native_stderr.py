"""What native code writes to stderr in a moment in which it complains of what is well.

Only the descriptor can be redirected, for the whole process: what else is written to it meanwhile is told afterwards.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence

STDERR = 2


@contextlib.contextmanager
def stderr_without(known: Sequence[str]) -> Iterator[None]:
    """Inside the block stderr is kept, and told at its end without the lines in which one of `known` stands.

    All of it is told where the block raises: then nothing is well.
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
