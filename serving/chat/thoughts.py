"""Kimi's thoughts, taken out of what a model generates.

    <think> what it thinks </think> its answer

Where the prompt ends with `<think>`, as Kimi K2.5's does, the answer begins inside a thought; Kimi-K2-Thinking begins
it itself. It ends at `</think>`, or where tool calls begin: K2.5 calls tools without ending its thought. An answer has
one thought, before all else. Only what was generated is judged, and a prompt by its last special token alone: what
earlier turns thought is no part of it.

The markers are special tokens, and each is a mark here (`tool_calls` says why). What comes out does not depend on how
the text is cut into pushes, and no white space is taken away but before a thought that the answer begins itself: sent
back by the client and rendered by the template, a thought is the tokens that were generated. Pure.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, final

from moonshard.serving.chat.tool_calls import NAMES as CALL_NAMES
from moonshard.serving.chat.tool_calls import SECTION_BEGIN

MARKS = THOUGHT_BEGIN, THOUGHT_END = tuple(map(chr, range(0xD805, 0xD807)))
NAMES: Mapping[str, str] = {THOUGHT_BEGIN: "<think>", THOUGHT_END: "</think>"}
_ENDS = (THOUGHT_END, SECTION_BEGIN)

Start = Literal["inside", "before"]  # where an answer begins: in a thought, or where one may begin


def thought_marks(special_tokens: Mapping[str, int]) -> dict[int, str]:
    """The mark of each marker's token id; empty for a vocabulary that lacks one of them, whose model does not think."""
    if not special_tokens.keys() >= set(NAMES.values()):
        return {}
    ends = {special_tokens[name]: SECTION_BEGIN for name in (CALL_NAMES[SECTION_BEGIN],) if name in special_tokens}
    return {special_tokens[name]: mark for mark, name in NAMES.items()} | ends


def answer_start(prompt: Sequence[int], special_tokens: Mapping[str, int]) -> Start | None:
    """Where an answer to this prompt begins, of a model that thinks; None after a thought that has ended."""
    marks, special_ids = thought_marks(special_tokens), frozenset(special_tokens.values())
    last = next((token_id for token_id in reversed(prompt) if token_id in special_ids), None)
    match marks.get(last) if last is not None else None:
        case mark if mark == THOUGHT_BEGIN:
            return "inside"
        case mark if mark == THOUGHT_END:
            return None
        case _:
            return "before"


@final
class ThoughtParser:
    """Separates one answer's text into its thought and the rest.

    `marks`: the mark of each marker's token id. A marker that begins or ends nothing is spelt out, unless it is one of
    `hidden`, which text does not show. After the thought those in `left` stay marks: whoever reads the rest knows them.
    """

    def __init__(
        self, start: Start, marks: Mapping[int, str], *, hidden: Collection[str] = (), left: Collection[str] = ()
    ):
        self.num_tokens = 0  # of the thought so far, without markers
        self._state: Literal["before", "inside", "after"] = start
        self._marks = marks
        self._held: list[str] = []  # white space before a thought may begin
        self._is_blank = True  # nothing was thought yet: a further `<think>` is the same one again
        self._spelt = {ord(mark): "" if mark in hidden else name for mark, name in {**NAMES, **CALL_NAMES}.items()}
        self._spelt_after = {mark: name for mark, name in self._spelt.items() if chr(mark) not in left}

    def push(self, token_ids: Sequence[int], text: str) -> tuple[str, str]:
        """What a step adds to the thought, and to what comes after. `text` is of these tokens or of earlier ones,
        markers are marks in it.
        """
        was_inside = self._state == "inside"
        if self._state == "before":
            text = self._begin(text)
        if was_inside or self._state == "inside":
            self._count(token_ids, is_inside=was_inside)
        if self._state != "inside":
            return "", _spelt(text, self._spelt_after)
        if self._is_blank:
            text = text.lstrip(THOUGHT_BEGIN)
            self._is_blank = not text
        end = min((place for mark in _ENDS if (place := text.find(mark)) >= 0), default=-1)
        if end < 0:
            return _spelt(text, self._spelt), ""
        self._state = "after"
        return _spelt(text[:end], self._spelt), _spelt(text[end:].removeprefix(THOUGHT_END), self._spelt_after)

    def finish(self) -> str:
        """The text that was held back."""
        held, self._held = "".join(self._held), []
        return held

    def _begin(self, text: str) -> str:
        """Decides whether there is a thought; what is left of the text to look at."""
        before, mark, thought = text.partition(THOUGHT_BEGIN)
        if mark and not before.strip():
            self._state, self._held = "inside", []
            return thought
        if text.strip():
            self._state = "after"
            return self.finish() + text
        self._held.append(text)
        return ""

    def _count(self, token_ids: Sequence[int], *, is_inside: bool) -> None:
        """`is_inside`: before the first of these tokens."""
        for mark in map(self._marks.get, token_ids):
            if is_inside and mark in _ENDS:
                return
            self.num_tokens += is_inside and mark != THOUGHT_BEGIN
            is_inside = is_inside or mark == THOUGHT_BEGIN


def _spelt(text: str, names: Mapping[int, str]) -> str:
    return text if text.isascii() else text.translate(names)
