"""Text to token ids and back.

One class for both file formats, because what matters is the same: user text never becomes a special token, every token
has exact bytes, and foreign errors carry our names. Adds no token of its own (no BOS): chat templates write theirs.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import final

from moonshard.models.tokenizer_json import load_json
from moonshard.models.tokenizer_tiktoken import load_tiktoken
from moonshard.models.vocabulary import Encoder, TextError, TokenIdError, TokenizerError, Vocabulary

__all__ = ["TextError", "TokenIdError", "Tokenizer", "TokenizerError", "check_text", "load_tokenizer"]


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
        """The special ids that `skip_special` leaves out; Kimi's `<think>`, where its folder says so, is not one."""
        return self._vocabulary.hidden_ids

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Raises TextError. `allow_special` is for text that no client wrote."""
        check_text(text)
        return self._encoder.with_specials(text) if allow_special else self._encoder.plain(text)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Bytes that are no UTF-8 become U+FFFD. Raises TokenIdError."""
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


def check_text(text: str) -> None:
    """Raises TextError at a lone surrogate, which no UTF-8 text has but JSON can spell."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as cause:
        raise TextError(f"the text has a lone surrogate, U+{ord(text[cause.start]):04X}, at {cause.start}") from cause


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer, from tokenizer.json where there is one; None when it has none. Raises TokenizerError."""
    if (path := folder / "tokenizer.json").exists():
        return Tokenizer(*load_json(path))
    if (path := folder / "tiktoken.model").exists():
        return Tokenizer(*load_tiktoken(path))
    return None
