"""Quotes what a client sent in the message that it is told."""

MAX_CHARS = 100


def quoted(text: str) -> str:
    """The text as Python's repr, of a long one only the beginning: writing 16 MB of control characters would take 90
    ms.
    """
    return repr(text) if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]!r}..."
