"""Token ids to the text a client may see now, for one sequence.

Two things must wait: bytes that do not make a character yet, and characters that may still become a stop string. Each
stop string is matched by its own Knuth-Morris-Pratt automaton, one step per character, so the work per token does not
grow with the text. Pure: no clock, no I/O. Stop tokens are the worker's, which ends on them. Tool calls are parsed in
`tool_calls`: for that, `marks` names tokens that are to be told from text that spells them.

Which stop string: the one that is complete first; the longest when several are complete at the same character. The text
ends before it. This does not depend on how tokens are grouped into pushes.
"""

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from moonshard.models.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What one push settled."""

    text: str
    stop_string: str | None = None
    num_tokens: int  # how many of the push's tokens count: up to and with the one that completed the stop string


@final
class Detokenizer:
    """`min_tokens`: a stop string counts only if the token completing it is at least that many-th (1 is the first).

    `marks`: by token id, a character that no text holds (a lone surrogate). It stands for the token, hidden or not, and
    no stop string reaches across it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        marks: Mapping[int, str] | None = None,
    ):
        self._tokenizer = tokenizer
        self._hidden_ids = tokenizer.hidden_ids if skip_special else frozenset[int]()
        self._marks = marks or {}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = [StopMatcher(string) for string in stop]
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._is_first = True
        self._held = ""
        self._stop_string: str | None = None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text. Only `finish` can complete one without a push saying so."""
        return self._stop_string

    def push(self, token_ids: Sequence[int]) -> Piece:
        """The text that these tokens settle. After a stop string everything is dropped. Raises TokenIdError."""
        texts: list[str] = []
        num_tokens = 0
        for token_id in token_ids:
            if self._stop_string is not None:
                break
            num_tokens += 1
            texts.append(self.push_token(token_id))
        return Piece(text="".join(texts), stop_string=self._stop_string, num_tokens=num_tokens)

    def push_token(self, token_id: int) -> str:
        """As `push` of this token, which `stop_string` does not end yet: what nearly every step of a stream is."""
        self._num_tokens += 1
        return self._settle(self._decode(token_id))

    def finish(self) -> str:
        """The text that was held back: no more tokens will come."""
        if self._stop_string is not None:
            return ""
        text = self._settle(self._utf8.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _decode(self, token_id: int) -> str:
        """The characters that this token completes."""
        if (mark := self._marks.get(token_id)) is None:
            return self._utf8.decode(self._bytes(token_id))
        self._is_first = False
        return self._utf8.decode(b"", final=True) + mark  # a character that a marker cuts in two is none

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._hidden_ids:
            return b""
        piece = self._tokenizer.token_bytes(token_id, is_first=self._is_first)
        self._is_first = False
        return piece

    def _settle(self, text: str) -> str:
        """Takes in new text and gives back what no stop string can claim any more."""
        if not self._stops:
            return text
        pending = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            # a list, not a generator: every automaton must see every character
            completed = [stop.string for stop in self._stops if stop.advance(char)]
            if completed and self._num_tokens >= self._min_tokens:
                self._stop_string = max(completed, key=len)
                self._held = ""
                return pending[: position - len(self._stop_string)]
        settled = len(pending) - max(stop.num_matched for stop in self._stops)
        self._held = pending[settled:]
        return pending[:settled]


@final
class StopMatcher:
    """How much of one stop string the text's end matches (Knuth, Morris, Pratt 1977)."""

    def __init__(self, string: str):
        """Raises ValueError for the empty string, which would match everywhere."""
        if not string:
            raise ValueError("a stop string must not be empty")
        self.string = string
        self.num_matched = 0  # always less than the whole: a complete match falls back to its longest border
        self._borders = borders(string)

    def advance(self, char: str) -> bool:
        """Takes one character; True when it completes the stop string."""
        matched = self.num_matched
        while matched and self.string[matched] != char:
            matched = self._borders[matched - 1]
        matched += self.string[matched] == char
        is_complete = matched == len(self.string)
        self.num_matched = self._borders[-1] if is_complete else matched
        return is_complete


def borders(string: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(string)
    length = 0
    for i in range(1, len(string)):
        while length and string[i] != string[length]:
            length = table[length - 1]
        length += string[i] == string[length]
        table[i] = length
    return table
