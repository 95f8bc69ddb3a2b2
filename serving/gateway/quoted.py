"""Quotes what a client sent in the message that it is told."""

MAX_CHARS = 100


def quoted(text: str) -> str:
    """As Python writes it; of a long one its beginning. Writing 16 MB of control characters would take 90 ms."""
    return repr(text) if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]!r}..."
