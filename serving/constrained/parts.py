"""What a client wrote to constrain an answer, as grammars of their own that the answer's grammar refers to.

Each stands beside the answer's grammar and not in its text, so that nothing a client writes can reach beyond its place:
JSON schemas as JSON, choices quoted as JSON strings, regular expressions by llguidance's own quoting, grammars in Lark
as they are and llama.cpp's GBNF translated. Checked here is what llguidance would not say, or not in words a client can
use; whether the rest can be served shows when it is compiled (`grammars`). Pure.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import msgspec

from moonshard.serving.constrained.schemas import SchemaError, check_schema

# White space of JSON: without a bound a model that has lost its way writes it for ever. Matched once at each place.
WHITESPACE = r"( |\n[ \t]{0,64})"
OPTIONS: Mapping[str, object] = {"whitespace_pattern": WHITESPACE, "json_allow_general_unicode_escapes": True}
MAX_PART_CHARS = 1 << 18
MAX_GBNF_CHARS, MAX_GBNF_RULES = 1 << 16, 1 << 9  # the translation takes their product of steps
_DRAFT = re.compile(r"https?://json-schema\.org/draft[-/]")
_ROOT = re.compile(r"(?m)^[ \t]*root[ \t]*::=")  # neither may take a line for another's beginning: that is quadratic
_START = re.compile(r"(?m)^[ \t]*(%llguidance|\??start[ \t]*:)")
_ESCAPE = re.compile(r"\\(?:u(?P<four>[0-9A-Fa-f]{4})|U(?P<eight>[0-9A-Fa-f]{8})|.)")
_MAX_WORDS_CHARS = 300  # of what a library says


class PartError(ValueError):
    """What was asked cannot be a grammar. `field`: as the client spelt it."""

    def __init__(self, field: str, problem: str):
        super().__init__(problem)
        self.field = field


@dataclass(frozen=True, slots=True)
class Part:
    """One grammar of a list of llguidance's, as JSON's text; `field` is what the client calls it."""

    definition: str  # the members of its object, but for its name
    field: str = ""

    def named(self, name: str) -> str:
        """The JSON object."""
        return f'{{"name":{_json(name)},{self.definition}}}'

    @property
    def schema(self) -> Mapping[str, object] | None:
        """The JSON schema; None for other grammars."""
        return msgspec.json.decode(f"{{{self.definition}}}").get("json_schema")


def json_part(schema: Mapping[str, object], field: str) -> Part:
    """JSON that keeps to a schema. PartError where nothing could, or where it is nested too deeply."""
    try:
        check_schema(schema)
        text = _json({**_of_known_dialect(schema), "x-guidance": OPTIONS})
    except (SchemaError, msgspec.EncodeError, UnicodeEncodeError) as error:
        raise PartError(field, str(error)) from error
    return _bounded(Part(f'"json_schema":{text}', field))


def _of_known_dialect(schema: Mapping[str, object]) -> Mapping[str, object]:
    """Without a `$schema` that is none of the standard's drafts: it is read as the latest of them."""
    if _DRAFT.match(str(schema.get("$schema", ""))) is not None:
        return schema
    return {name: value for name, value in schema.items() if name != "$schema"}


@cache
def object_part(field: str = "") -> Part:
    """Any JSON object."""
    return json_part({"type": "object"}, field)


def regex_part(pattern: str, field: str) -> Part:
    """All of a text that a regular expression matches as a whole. Its syntax is that of Rust's `regex`."""
    from llguidance import LLMatcher  # takes long to import, and most servers never need it

    (grammar,) = msgspec.json.decode(LLMatcher.grammar_from_regex(_text(pattern, field)))["grammars"]
    return _lark(grammar["lark_grammar"], field)


def choice_part(texts: Sequence[str], field: str) -> Part:
    """One of these texts. PartError where there is none."""
    if not texts:
        raise PartError(field, "there is nothing to choose from")
    return _lark(f"start: TEXT\nTEXT: {' | '.join(lark_string(_text(text, field)) for text in texts)}", field)


def lark_part(grammar: str, field: str) -> Part:
    """A grammar in llguidance's form of Lark, or in llama.cpp's GBNF, which has `root ::=`. PartError for neither."""
    grammar = _text(grammar, field)
    is_gbnf = _ROOT.search(grammar) is not None or _START.search(grammar) is None
    return _lark(_translated(grammar, field) if is_gbnf else grammar, field)


def lark_string(text: str) -> str:
    """As a literal of Lark, whose strings are JSON's without a bare DEL."""
    return _json(text).replace("\x7f", "\\u007f")


def _lark(grammar: str, field: str) -> Part:
    return _bounded(Part(f'"lark_grammar":{_json(grammar)}', field))


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _bounded(part: Part) -> Part:
    if len(part.definition) > MAX_PART_CHARS:
        raise PartError(part.field, f"it takes {len(part.definition)} characters, at most {MAX_PART_CHARS} are taken")
    return part


def _text(text: str, field: str) -> str:
    if len(text) > MAX_PART_CHARS:
        raise PartError(field, f"it has {len(text)} characters, at most {MAX_PART_CHARS} are taken")
    if re.search("[\ud800-\udfff]", text):
        raise PartError(field, "it has a lone surrogate")
    return text


def _translated(grammar: str, field: str) -> str:
    """GBNF in Lark."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    num_rules = grammar.count("::=")
    if not num_rules:
        raise PartError(field, "it is neither Lark with a rule `start:` nor GBNF with a rule `root ::=`")
    if len(grammar) > MAX_GBNF_CHARS or num_rules > MAX_GBNF_RULES:
        raise PartError(field, f"of GBNF at most {MAX_GBNF_CHARS} characters and {MAX_GBNF_RULES} rules are taken")
    try:
        return gbnf_to_lark(_ESCAPE.sub(_shorter_escape, grammar))
    except RecursionError:
        raise PartError(field, "it is nested too deeply") from None
    except IndexError:
        raise PartError(field, "it ends within an escape") from None
    except Exception as error:  # the library raises no other class of its own
        raise PartError(field, str(error)[:_MAX_WORDS_CHARS]) from error


def _shorter_escape(match: re.Match[str]) -> str:
    """A character by its number, as itself or with two digits: the translation would take zeros off the others."""
    number = int(match["four"] or match["eight"] or "0", 16)
    if not 0 < number <= sys.maxunicode or 0xD800 <= number < 0xE000:
        return match[0]
    return chr(number) if number >= 0x80 else f"\\x{number:02x}"
