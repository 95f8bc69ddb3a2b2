"""Text to token ids and back.

One class serves both file formats, with the same promises: user text never becomes a special token, every token has
exact bytes, and errors of the libraries are raised as ours. It adds no token of its own (no BOS): chat templates write
theirs.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import final

from moonshard.models.tokenizers.hugging_face import load_json
from moonshard.models.tokenizers.tiktoken_file import load_tiktoken
from moonshard.models.tokenizers.vocabulary import (
    Encoder,
    TextError,
    TextTooLongError,
    TokenIdError,
    TokenizerError,
    Vocabulary,
)

__all__ = [
    "TextError",
    "TextTooLongError",
    "TokenIdError",
    "Tokenizer",
    "TokenizerError",
    "check_text",
    "load_tokenizer",
]
PROBE_CHARS_PER_TOKEN = 4  # a text with fewer characters for each token that it may have is encoded at once
PIECE_CHARS = 1 << 14  # Hugging Face's tokenizers take 70 to 150 times a text's bytes while they encode it


@final
class Tokenizer:
    """Immutable; may be used from several threads."""

    def __init__(self, vocabulary: Vocabulary, encoder: Encoder):
        self._vocabulary = vocabulary
        self._encoder = encoder

    @property
    def vocab_size(self) -> int:
        """One more than the largest id. A model's embedding may have more rows."""
        return len(self._vocabulary.pieces)

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Names to ids, which `encode` never yields unless allowed."""
        return self._vocabulary.special_tokens

    @property
    def hidden_ids(self) -> frozenset[int]:
        """The special ids that `skip_special` drops; Kimi's `<think>`, where its folder says so, is not one."""
        return self._vocabulary.hidden_ids

    @property
    def max_token_bytes(self) -> int | None:
        """The most bytes of a text that one token stands for. None where the tokenizer gives no such bound."""
        return self._vocabulary.max_token_bytes

    def encode(self, text: str, *, allow_special: bool = False, max_tokens: int | None = None) -> list[int]:
        """Ids of `text`. `allow_special` is for text that no client wrote.

        With `max_tokens`, work and memory are those of a text with a few times as many tokens, however long it is. Ids
        beyond that number may still come back: where all of it was encoded, the number is the caller's to look at.

        Raises TextError, and TextTooLongError at a text that certainly has more tokens than `max_tokens`.
        """
        num_bytes = check_text(text)
        encode = self._encoder.with_specials if allow_special else self._encoder.plain
        if max_tokens is None:
            return encode(text)
        if (most := self.max_token_bytes) and num_bytes > most * max_tokens:
            raise TextTooLongError(-(-num_bytes // most))
        _probe(encode, text, max_tokens)
        return encode(text)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of these ids; bytes that are no UTF-8 become U+FFFD. Raises TokenIdError."""
        hidden = self.hidden_ids if skip_special else frozenset()
        shown = [token_id for token_id in ids if token_id not in hidden]
        pieces = [self.token_bytes(token_id, is_first=position == 0) for position, token_id in enumerate(shown)]
        return b"".join(pieces).decode("utf-8", "replace")

    def token_bytes(self, token_id: int, *, is_first: bool = False) -> bytes:
        """The bytes a token adds to a text; a special token's are its name. Raises TokenIdError.

        At the beginning of a text (`is_first`) SentencePiece drops the space that begins a word.
        """
        pieces = self._vocabulary.pieces
        piece = pieces[token_id] if 0 <= token_id < len(pieces) else None
        if piece is None:
            raise TokenIdError(f"there is no token {token_id} in this vocabulary of {len(pieces)}")
        return self._without_leading_spaces(piece) if is_first else piece

    def _without_leading_spaces(self, piece: bytes) -> bytes:
        stripped = piece.lstrip(b" ")
        return piece[min(len(piece) - len(stripped), self._vocabulary.num_dropped_spaces) :]


def _probe(encode: Callable[[str], list[int]], text: str, max_tokens: int) -> None:
    """TextTooLongError once pieces of the text have over twice `max_tokens` tokens.

    A cut changes tokens only beside it, so the whole has over `max_tokens`. A text that has few characters for each of
    them is not looked at.
    """
    if len(text) <= PROBE_CHARS_PER_TOKEN * max(1, max_tokens):
        return
    num_tokens = 0
    for start in range(0, len(text), PIECE_CHARS):
        num_tokens += len(encode(text[start : start + PIECE_CHARS]))
        if num_tokens > 2 * max_tokens:
            raise TextTooLongError(num_tokens // 2)


def check_text(text: str) -> int:
    """Its number of bytes in UTF-8. Raises TextError at a lone surrogate, which JSON can spell and UTF-8 has not."""
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as cause:
        raise TextError(f"the text has a lone surrogate, U+{ord(text[cause.start]):04X}, at {cause.start}") from cause


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer, from tokenizer.json if there is one; None if it has none. Raises TokenizerError."""
    if (path := folder / "tokenizer.json").exists():
        return Tokenizer(*load_json(path))
    if (path := folder / "tiktoken.model").exists():
        return Tokenizer(*load_tiktoken(path))
    return None
