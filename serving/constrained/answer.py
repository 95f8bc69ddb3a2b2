"""The grammar of a whole answer, from its first generated token on: its thought, its text, its calls.

Special tokens are written by their ids: a vocabulary may lack a name's angle brackets, and a text that spells one out
is text. Free text never holds them. Where the answer begins (`thoughts.Start`) says whether a thought comes first; what
was asked holds for what follows it. A thought that calls tools may go without its end, as Kimi K2.5's does.

The text depends on nothing but what was asked and on the vocabulary: equal requests share what is compiled of it. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moonshard.serving.chat.thoughts import NAMES as THOUGHT_NAMES
from moonshard.serving.chat.thoughts import THOUGHT_BEGIN, THOUGHT_END, Start
from moonshard.serving.chat.tool_calls import (
    ARGUMENTS_BEGIN,
    CALL_BEGIN,
    CALL_END,
    NAMES,
    SECTION_BEGIN,
    SECTION_END,
)
from moonshard.serving.constrained.parts import Part, lark_string, object_part

_TEXT = r"TEXT: /(.|\n)*/"
_NUMBER = "/[0-9]{1,9}/"  # of a call in its conversation
_OBJECT = "arguments"  # the part that is any object


@dataclass(frozen=True, kw_only=True, slots=True)
class Calls:
    """The functions that an answer may call. `arguments`: by name, of those that keep to a schema; others' are any
    object.
    """

    functions: frozenset[str]
    arguments: Mapping[str, Part] = field(default_factory=dict)
    is_required: bool = False  # and nothing else may be said
    is_single: bool = False  # the answer ends with the end of its first call


def answer_grammar(
    form: Part | None, calls: Calls | None, start: Start | None, special_tokens: Mapping[str, int]
) -> str:
    """Of an answer that keeps to `form`, or that makes calls; without `form` it may be text before it makes them.

    `special_tokens`: those of the calls' and the thought's markers that are asked for.
    """
    ids = {mark: f"<[{special_tokens[name]}]>" for mark, name in _NAMES.items() if name in special_tokens}
    body, rules = "@form" if form is not None else "TEXT", [_TEXT]
    section, parts = None, {}
    if calls is not None:
        section, body, names = "section", _with_calls(body, calls), sorted(calls.functions)
        rules += _section(calls, names, ids)
        parts = _argument_parts(calls, names)
    if form is not None:
        parts["form"] = form
    return _joined([f"start: {_after_thought(body, section, start, ids)}", *rules], parts)


def call_grammar(arguments: Part | None, special_tokens: Mapping[str, int]) -> str:
    """Of the rest of a call whose beginning was forced. `arguments`: None for any object."""
    end = special_tokens[NAMES[CALL_END]]
    return _joined([f"start: @{_OBJECT} <[{end}]>"], {_OBJECT: arguments or object_part()})


def part_grammar(part: Part) -> str:
    """Of an answer that is this part, and nothing else."""
    return f'{{"grammars":[{part.named("part")}]}}'


_NAMES: Mapping[str, str] = {**NAMES, **THOUGHT_NAMES}


def _with_calls(body: str, calls: Calls) -> str:
    if calls.is_required:
        return "section"
    return "TEXT section?" if body == "TEXT" else f"({body} | section)"


def _after_thought(body: str, section: str | None, start: Start | None, ids: Mapping[str, str]) -> str:
    """`body` behind the thought in which, or before which, the answer begins."""
    if start is None:
        return body
    ended = f"{ids[THOUGHT_END]} {body}" if section is None else f"({ids[THOUGHT_END]} {body} | {section})"
    if start == "inside":
        return f"TEXT {ended}"
    return f"{ids[THOUGHT_BEGIN]} TEXT {ended} | {body}"


def _section(calls: Calls, names: Sequence[str], ids: Mapping[str, str]) -> list[str]:
    """The rules of a section of calls."""
    made = "call" if calls.is_single else f"call+ {ids[SECTION_END]}"
    loose = [f"ID_{i}" for i, name in enumerate(names) if name not in calls.arguments]
    forms = [f"ID_{i} {ids[ARGUMENTS_BEGIN]} @{_OBJECT}_{i}" for i, name in enumerate(names) if name in calls.arguments]
    if loose:
        forms.append(f"({' | '.join(loose)}) {ids[ARGUMENTS_BEGIN]} @{_OBJECT}")
    return [
        f"section: {ids[SECTION_BEGIN]} {made}",
        f"call: {ids[CALL_BEGIN]} ({' | '.join(forms)}) {ids[CALL_END]}",
        *(f"ID_{i}: {lark_string(f'functions.{name}:')} {_NUMBER}" for i, name in enumerate(names)),
    ]


def _argument_parts(calls: Calls, names: Sequence[str]) -> dict[str, Part]:
    parts = {f"{_OBJECT}_{i}": calls.arguments[name] for i, name in enumerate(names) if name in calls.arguments}
    return parts if len(parts) == len(names) else {_OBJECT: object_part(), **parts}


def _joined(rules: list[str], parts: Mapping[str, Part]) -> str:
    """The rules, and the parts that they refer to by `@` and a name."""
    top = Part(f'"lark_grammar":{lark_string(chr(10).join(rules))}').named("answer")
    return f'{{"grammars":[{",".join([top, *(part.named(name) for name, part in parts.items())])}]}}'
