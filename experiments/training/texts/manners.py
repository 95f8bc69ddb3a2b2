"""How a client and its tools write what they say: the spelling of declarations and results, and an agent's rules.

Libraries and languages differ: Python spaces its JSON, nearly all others do not; some wrap a result, repeat what was
asked, or order keys otherwise; some declare functions without a description. A conversation has one manner. The plain
one is that of the conversations which the model was first trained on. The words that carry meaning stay as
`tool_library` has them, and so does what the assistant writes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from moonshard.experiments.training.texts import words
from moonshard.experiments.training.texts.conversation import Tool
from moonshard.experiments.training.texts.tools import tool_words
from moonshard.experiments.training.texts.tools.tool_words import Value

Separators = tuple[str, str]  # behind an element and behind a key, as in json.dumps
SPACED: Separators = (", ", ": ")
COMPACT: Separators = (",", ":")
MEASURES = frozenset({"degrees", "total", "price", "km", "balance", "calories"})  # fields that may have decimals
ENVELOPES = ("data", "result", "output", "response", "value")
STATES = ({"ok": True}, {"success": True}, {"error": None}, {"code": 200}, {"cached": False})
RULES = (
    "You are an agent. You work for one person and you have tools.",
    "Use a tool when you need something that you do not know.",
    "Call a function with the values that the user gives. Do not make up any.",
    "When the tool has answered, tell the user what it found.",
    "Answer in one short sentence.",
    "If no tool can do it, say so.",
    "If the tool returns an error, tell the user.",
    "You may call two tools at once.",
    "Do not talk about the tools.",
    "Be friendly and brief.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manner:
    """How one client spells things. `PLAIN` draws no random numbers, so texts made without manners stay the same."""

    separators: Separators = SPACED
    indent: int | None = None  # as in json.dumps; the separators are then its own
    is_shuffled: bool = False  # keys of results and of declarations
    has_decimals: bool = False
    has_numbers_as_strings: bool = False
    has_echo: bool = False  # what was asked, beside what was found
    envelope: str | None = None  # under which key a result lies
    state: Mapping[str, object] | None = None  # what stands beside an envelope
    nests: bool = False  # of several fields the last lies one deeper
    is_bare: bool = False  # a single value instead of an object
    has_description: bool = True
    is_strict: bool = False  # as strict clients declare
    has_titles: bool = False  # as pydantic declares
    rules: tuple[str, ...] = ()  # an agent's system prompt

    def found(self, random: Random, result: Mapping[str, Value]) -> dict[str, Any]:
        """The values as they appear in the result and in the answer."""
        return {name: self._told(random, name, value) for name, value in result.items()}

    def written(self, random: Random, result: Mapping[str, Any], arguments: Mapping[str, object]) -> str:
        """What a tool returns."""
        if self.is_bare and len(result) == 1:
            (value,) = result.values()
            return value if isinstance(value, str) else self._dumped(value)
        fields: dict[str, Any] = dict(result)
        if self.has_numbers_as_strings:
            fields = {name: value if isinstance(value, str) else str(value) for name, value in fields.items()}
        if self.has_echo:
            fields = {**{name: value for name, value in arguments.items() if name not in fields}, **fields}
        if self.is_shuffled:
            fields = _shuffled(random, fields)
        if self.nests and len(fields) > 1:
            *first, last = fields
            fields = {name: fields[name] for name in first} | {"details": {last: fields[last]}}
        if self.envelope is not None:
            fields = {**(self.state or {}), self.envelope: fields}
        return self._dumped(fields)

    def failed(self, error: str) -> str:
        return self._dumped({"error": error})

    def declared(self, random: Random, tool: Tool) -> Tool:
        """A declaration with the same meaning, spelt in this manner."""
        if self == PLAIN:
            return tool
        function: dict[str, Any] = dict(tool["function"])
        parameters: dict[str, Any] = dict(function["parameters"])
        if not self.has_description:
            del function["description"]
        if self.has_titles:
            named = parameters["properties"].items()
            parameters["properties"] = {name: {**it, "title": name.title().replace("_", " ")} for name, it in named}
        if self.is_strict:
            parameters["additionalProperties"] = False
            function["strict"] = True
        if self.is_shuffled:
            function, parameters = _shuffled(random, function), _shuffled(random, parameters)
        function["parameters"] = parameters
        return {"type": "function", "function": function}

    def _told(self, random: Random, name: str, value: Value) -> Value | float:
        if not self.has_decimals or name not in MEASURES or isinstance(value, str):
            return value
        return round(value + random.randrange(10, 100) / 100, random.choice((1, 1, 2)))

    def _dumped(self, value: object) -> str:
        separators = None if self.indent is not None else self.separators
        return json.dumps(value, ensure_ascii=False, separators=separators, indent=self.indent)


PLAIN = Manner()


def manner(random: Random) -> Manner:
    """Draws one client's manner; most write JSON compactly."""
    is_wrapped = random.random() < 0.3
    return Manner(
        separators=COMPACT if random.random() < 0.7 else SPACED,
        indent=random.choice((2, 4)) if random.random() < 0.1 else None,
        is_shuffled=random.random() < 0.4,
        has_decimals=random.random() < 0.4,
        has_numbers_as_strings=random.random() < 0.1,
        has_echo=random.random() < 0.3,
        envelope=random.choice(ENVELOPES) if is_wrapped else None,
        state=random.choice(STATES) if is_wrapped and random.random() < 0.5 else None,
        nests=random.random() < 0.2,
        is_bare=random.random() < 0.1,
        has_description=random.random() < 0.5,
        is_strict=random.random() < 0.3,
        has_titles=random.random() < 0.15,
        rules=_rules(random) if random.random() < 0.4 else (),
    )


def _rules(random: Random) -> tuple[str, ...]:
    """The agent's rules: what it is first, the others in any order."""
    others = random.sample(RULES[1:], random.randint(2, 6))
    about = (f"Today is {tool_words.day(random)}.", f"The user is called {random.choice(words.FIRST_NAMES)}.")
    return (RULES[0], *others, *random.sample(about, random.randint(0, 2)))


def _shuffled(random: Random, fields: Mapping[str, Any]) -> dict[str, Any]:
    return dict(random.sample(list(fields.items()), len(fields)))
