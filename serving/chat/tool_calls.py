"""Kimi's tool calls, taken out of what a model generates.

    <|tool_calls_section_begin|>
        <|tool_call_begin|> functions.get_weather:0 <|tool_call_argument_begin|> {"city": "Oslo"} <|tool_call_end|> ...
    <|tool_calls_section_end|>

The five markers are special tokens. Here each is a mark: one lone surrogate, which no decoded text holds. So a marker
is never split, and text that merely spells its name stays text.

A call begins for the client once it is known to be one: its id names a declared function and its arguments begin as an
object. From then on its arguments are passed on as they are generated, and as they were written: sent back by the
client and rendered by the template, they are the tokens that were generated, and a prefix hit. Whether they are whole
shows only at their end, as with OpenAI: an answer that was cut off within them says so by its finish reason. What is no
call is text as it is, markers spelt out: whoever reads it sees what the model did; but the beginning of a call at which
the answer was cut off is neither. A section may lack its end, and a call too where another marker or the end of the
answer follows. What comes out does not depend on how the text is cut
into pushes.

Pure. Only Kimi's format is read, and arguments are not checked against their schema.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import final

import msgspec

from moonshard.rpc.types import ToolCallPart

MARKS = SECTION_BEGIN, SECTION_END, CALL_BEGIN, ARGUMENTS_BEGIN, CALL_END = tuple(map(chr, range(0xD800, 0xD805)))
NAMES: Mapping[str, str] = {
    SECTION_BEGIN: "<|tool_calls_section_begin|>",
    SECTION_END: "<|tool_calls_section_end|>",
    CALL_BEGIN: "<|tool_call_begin|>",
    ARGUMENTS_BEGIN: "<|tool_call_argument_begin|>",
    CALL_END: "<|tool_call_end|>",
}
_FOLLOWERS: Mapping[str, str] = {
    "": SECTION_BEGIN,
    SECTION_BEGIN: CALL_BEGIN,
    CALL_BEGIN: ARGUMENTS_BEGIN,
    ARGUMENTS_BEGIN: "",
    CALL_END: CALL_BEGIN,
}  # but for a call's end, and for a section's end after one
_MARK = re.compile(f"([{''.join(MARKS)}])")
_ARGUMENTS = msgspec.json.Decoder(dict[str, msgspec.Raw])  # checked in full, and no value of it built


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed:
    """What one push gave."""

    content: str
    calls: tuple[ToolCallPart, ...] = ()


def call_marks(special_tokens: Mapping[str, int]) -> dict[int, str]:
    """The mark of each marker's token id; empty for a vocabulary that lacks one of them and so has no tool calls."""
    if not special_tokens.keys() >= set(NAMES.values()):
        return {}
    return {special_tokens[name]: mark for mark, name in NAMES.items()}


def spelt(marked: str) -> str:
    """The text with every mark as its marker's name."""
    return _MARK.sub(lambda match: NAMES[match[0]], marked)


def free_call_id(name: str, number: str, taken: Collection[str]) -> str:
    """The id of a call, as the model counts; where it has lost count, the next free number.

    Clients tell results apart by ids.
    """
    call_id, following = f"functions.{name}:{number}", len(taken)
    while call_id in taken:
        call_id, following = f"functions.{name}:{following}", following + 1
    return call_id


@final
class ToolCallParser:
    """Separates one answer's text into content and tool calls.

    `call_ids`: those of the conversation so far, which no new call gets again. `max_calls`: further calls are dropped.
    """

    def __init__(self, functions: Collection[str], call_ids: Collection[str] = (), *, max_calls: int | None = None):
        self._functions = functions
        self._call_ids = set(call_ids)
        self._max_calls = max_calls
        self._num_calls = 0
        self._last_mark = ""  # of the open section; empty: there is none
        self._held: list[str] = []  # of the section: what is no part of a call yet
        self._named: tuple[str, str] | None = None  # whom the call that is being read calls, once that is known
        self._arguments: list[str] | None = None  # of the call that has begun
        self._content: list[str] = []
        self._calls: list[ToolCallPart] = []

    @property
    def num_calls(self) -> int:
        """How many calls have begun, without the dropped ones."""
        return self._num_calls if self._max_calls is None else min(self._num_calls, self._max_calls)

    @property
    def is_cut(self) -> bool:
        """Whether a call has begun and its arguments are not whole."""
        return self._arguments is not None and self._is_kept and not _is_object("".join(self._arguments))

    def push(self, text: str) -> Parsed:
        """The content and the parts of calls that this piece settles. Markers are marks in it."""
        for part in filter(None, _MARK.split(text)):
            if part in NAMES:
                self._take_mark(part)
            else:
                self._take_text(part)
        return self._taken()

    def finish(self, *, is_cut_off: bool = False) -> Parsed:
        """What is held is text after all, but for white space after a call without its end.

        `is_cut_off`: by its length or a stop string. What is held is then the beginning of a call, and dropped.
        """
        if not is_cut_off and self._arguments is None and (self._last_mark != CALL_END or "".join(self._held).strip()):
            self._let_go()
        return self._taken()

    def _taken(self) -> Parsed:
        parsed = Parsed(content="".join(self._content), calls=tuple(self._calls))
        self._content, self._calls = [], []
        return parsed

    def _take_mark(self, mark: str) -> None:
        if self._arguments is not None:
            self._end_call()  # whether or not this is how it should end
            if mark == CALL_END:
                return
        match self._last_mark, mark:
            case ("", _) if mark != SECTION_BEGIN:
                self._content.append(NAMES[mark])
            case (last, _) if mark in _FOLLOWERS[last] and self._is_called(mark):
                self._held.append(mark)
                self._last_mark = mark
            case (last, _) if mark == SECTION_END and last == CALL_END:
                self._held, self._last_mark = [], ""
            case _:
                self._let_go()
                self._take_mark(mark)

    def _take_text(self, text: str) -> None:
        if self._arguments is not None:
            self._argue(text)
        elif self._last_mark == ARGUMENTS_BEGIN and text.lstrip().startswith("{"):
            self._begin_call()
            self._argue(text.lstrip())
        elif self._last_mark == CALL_BEGIN or (self._last_mark and not text.strip()):
            self._held.append(text)
        else:
            self._let_go()
            self._content.append(text)

    def _let_go(self) -> None:
        """The open section is malformed, or nothing more will come: what is held of it becomes text."""
        self._content.append(spelt("".join(self._held)))
        self._held, self._last_mark = [], ""

    def _is_called(self, mark: str) -> bool:
        """Whether what stands before this mark names a function, where it should."""
        if mark == ARGUMENTS_BEGIN:
            self._named = self._function("".join(self._held).rpartition(CALL_BEGIN)[2])
            return self._named is not None
        return True

    def _begin_call(self) -> None:
        if self._named is None:
            raise RuntimeError("a call begins before it is known whom it calls")
        (name, number), self._held, self._arguments = self._named, [], []
        self._num_calls += 1
        if self._is_kept:
            call_id = free_call_id(name, number, self._call_ids)
            self._call_ids.add(call_id)
            self._calls.append(ToolCallPart(index=self._num_calls - 1, id=call_id, name=name))

    def _argue(self, text: str) -> None:
        """Takes more of a call's arguments. White space is held back, since at the end of the arguments it belongs to
        nothing.
        """
        if self._arguments is None:
            raise RuntimeError("there are arguments and no call")
        if not (settled := text.rstrip()):
            self._held.append(text)
            return
        arguments = "".join(self._held) + settled
        self._held = [text[len(settled) :]]
        self._arguments.append(arguments)
        if self._is_kept:
            self._calls.append(ToolCallPart(index=self._num_calls - 1, arguments=arguments))

    def _end_call(self) -> None:
        self._held, self._last_mark, self._arguments = [], CALL_END, None

    @property
    def _is_kept(self) -> bool:
        return self._max_calls is None or self._num_calls <= self._max_calls

    def _function(self, call_id: str) -> tuple[str, str] | None:
        """Name and number of `functions.<name>:<number>`, the prefix of which models forget; None: there is no such."""
        written, _, number = call_id.strip().rpartition(":")
        if number.isascii() and number.isdecimal():
            for name in (written.removeprefix("functions."), written):
                if name in self._functions:
                    return name, number
        return None


def _is_object(text: str) -> bool:
    try:
        _ARGUMENTS.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
