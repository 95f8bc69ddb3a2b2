"""Kimi's tool calls, taken out of what a model generates.

    <|tool_calls_section_begin|>
        <|tool_call_begin|> functions.get_weather:0 <|tool_call_argument_begin|> {"city": "Oslo"} <|tool_call_end|> ...
    <|tool_calls_section_end|>

The five markers are special tokens. Here each is a mark: one lone surrogate, which no decoded text holds. So a marker
is never split, and text that merely spells its name stays text.

A client acts on the calls it was sent and cannot be told to forget one, and whether they are valid shows only at the
end: arguments may turn out to be no JSON, a section may be cut off. So a section is held back whole. At its end it is
calls; at its first fault it is text as it is, markers spelt out: whoever reads it sees what the model did. The price is
that arguments do not stream while they are generated: calls are short. What comes out does not depend on how the text
is cut into pushes.

A section is valid when it has one call or more and nothing but white space between their markers, and each call names a
declared function and has a JSON object as its arguments. These are passed on as they were written: sent back by the
client and rendered by the template, they are the tokens that were generated, and a prefix hit.

Pure. Left out: the formats of other models, the arguments' schema.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import final

import msgspec

MARKS = SECTION_BEGIN, SECTION_END, CALL_BEGIN, ARGUMENTS_BEGIN, CALL_END = tuple(map(chr, range(0xD800, 0xD805)))
NAMES: Mapping[str, str] = {
    SECTION_BEGIN: "<|tool_calls_section_begin|>",
    SECTION_END: "<|tool_calls_section_end|>",
    CALL_BEGIN: "<|tool_call_begin|>",
    ARGUMENTS_BEGIN: "<|tool_call_argument_begin|>",
    CALL_END: "<|tool_call_end|>",
}
_FOLLOWERS: Mapping[str, str] = {
    SECTION_BEGIN: CALL_BEGIN,
    CALL_BEGIN: ARGUMENTS_BEGIN,
    ARGUMENTS_BEGIN: CALL_END,
    CALL_END: CALL_BEGIN + SECTION_END,
}
_MARK = re.compile(f"([{''.join(MARKS)}])")
_CALL = re.compile(f"{CALL_BEGIN}([^{ARGUMENTS_BEGIN}]*){ARGUMENTS_BEGIN}([^{CALL_END}]*){CALL_END}")
_ARGUMENTS = msgspec.json.Decoder(dict[str, msgspec.Raw])  # checked in full, and no value of it built


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # a JSON object, as the model wrote it


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed:
    """What one push gave."""

    content: str
    calls: tuple[ToolCall, ...] = ()


def call_marks(special_tokens: Mapping[str, int]) -> dict[int, str]:
    """The mark of each marker's token id; empty for a vocabulary that lacks one of them and so has no tool calls."""
    if not special_tokens.keys() >= set(NAMES.values()):
        return {}
    return {special_tokens[name]: mark for mark, name in NAMES.items()}


def spelt(marked: str) -> str:
    """The text with every mark as its marker's name."""
    return _MARK.sub(lambda match: NAMES[match[0]], marked)


@final
class ToolCallParser:
    """Takes one answer's text apart. `call_ids`: those of the conversation so far, which no new call gets again."""

    def __init__(self, functions: Collection[str], call_ids: Collection[str] = ()):
        self._functions = functions
        self._call_ids = set(call_ids)
        self._held: list[str] = []  # the open section, if there is one
        self._last_mark = ""  # of the open section

    def push(self, text: str) -> Parsed:
        """The content and the calls that this piece settles. Markers are marks in it."""
        content: list[str] = []
        calls: list[ToolCall] = []
        for part in _MARK.split(text):
            if not self._is_in_order(part):
                content.append(self.finish())
                content.append(self._begin(part))
                continue
            self._hold(part)
            if part == SECTION_END:
                made = self._close()
                calls += made
                content.append("" if made else self.finish())
        return Parsed(content="".join(content), calls=tuple(calls))

    def finish(self) -> str:
        """The open section as text: it has a fault, or nothing more will come."""
        held = spelt("".join(self._held))
        self._held = []
        return held

    def _is_in_order(self, part: str) -> bool:
        """Whether the open section may go on with this text or mark."""
        if not self._held:
            return False
        if part in NAMES:
            return part in _FOLLOWERS[self._last_mark]
        return self._last_mark in (CALL_BEGIN, ARGUMENTS_BEGIN) or not part.strip()

    def _begin(self, part: str) -> str:
        """The text of a part that goes on with no section; none where it begins one."""
        if part != SECTION_BEGIN:
            return spelt(part)
        self._hold(part)
        return ""

    def _hold(self, part: str) -> None:
        self._held.append(part)
        self._last_mark = part if part in NAMES else self._last_mark

    def _close(self) -> list[ToolCall]:
        """The calls of the complete section; none, and the section is still held, where one of them is not valid."""
        written = _CALL.findall("".join(self._held))
        named = [(self._function(call_id), arguments.strip()) for call_id, arguments in written]
        valid = [(*function, arguments) for function, arguments in named if function and _is_object(arguments)]
        if len(valid) < len(written):
            return []
        self._held = []
        return [
            ToolCall(id=self._new_id(name, index), name=name, arguments=arguments) for name, index, arguments in valid
        ]

    def _function(self, call_id: str) -> tuple[str, str] | None:
        """Name and index of `functions.<name>:<index>`, the prefix of which models forget; None if there is no such."""
        written, _, index = call_id.strip().rpartition(":")
        if index.isascii() and index.isdecimal():
            for name in (written.removeprefix("functions."), written):
                if name in self._functions:
                    return name, index
        return None

    def _new_id(self, name: str, index: str) -> str:
        """As the model counts; where it has lost count, the next free number: clients tell results apart by ids."""
        call_id, number = f"functions.{name}:{index}", len(self._call_ids)
        while call_id in self._call_ids:
            call_id, number = f"functions.{name}:{number}", number + 1
        self._call_ids.add(call_id)
        return call_id


def _is_object(text: str) -> bool:
    try:
        _ARGUMENTS.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
