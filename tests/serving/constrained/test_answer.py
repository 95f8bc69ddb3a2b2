"""The grammar of an answer, held against llguidance: the right is allowed to its end, the wrong up to its fault."""

import json
import time
from collections.abc import Mapping
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moonshard.serving.chat.thoughts import Start
from moonshard.serving.constrained.answer import Calls, answer_grammar, call_grammar
from moonshard.serving.constrained.grammars import GrammarError
from moonshard.serving.constrained.parts import (
    Part,
    PartError,
    choice_part,
    json_part,
    lark_part,
    object_part,
    regex_part,
)
from tests.serving.constrained.vocabulary import (
    ARGUMENTS_BEGIN,
    CALL_BEGIN,
    CALL_END,
    SECTION_BEGIN,
    SECTION_END,
    SPECIALS,
    accepted,
    call,
    new_grammars,
    section,
)

GRAMMARS = new_grammars()
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "kind": {"enum": ["cat", "\u00e9lan \U0001f327", 3]},
        "friends": {"type": "array", "items": {"$ref": "#/$defs/friend"}, "maxItems": 2},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
    "$defs": {
        "friend": {"type": "object", "properties": {"of": {"type": "integer"}}, "required": ["of"]},
    },
}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
GBNF = r"""# as llama.cpp writes them
root ::= "{" space "\"a\"" space ":" space string "}" space
space ::= | " " | "\n"{1,2} [ \t]{0,20}
string ::= "\"" (start-of | "\U0001f327") char? "\"" space
start-of ::= "\u00e9" | [\u0043]
char ::= [^"\\\x7F\x00-\x1F] | [\\] (["\\bfnrt] | "u" [0-9a-fA-F]{4})
"""
NAMES = frozenset({"get_weather", "add-up"})
STRICT = {"get_weather": json_part(CITY, "tools")}
OSLO = '{"city": "Oslo"}'


def check(grammar: str, right: list[str], wrong: Mapping[str, str]) -> None:
    """`wrong`: answers, and how far they are allowed."""
    assert [answer for answer in right if accepted(GRAMMARS, grammar, answer) is not None] == []
    assert {answer: accepted(GRAMMARS, grammar, answer) for answer in wrong} == dict(wrong)


def form(part: Part, start: Start | None = None) -> str:
    return answer_grammar(part, None, start, SPECIALS)


def calls(start: Start | None = None, form: Part | None = None, **told: object) -> str:
    return answer_grammar(form, Calls(functions=NAMES, **told), start, SPECIALS)  # pyright: ignore[reportArgumentType]


def test_an_answer_keeps_to_a_schema_in_bounded_white_space():
    check(
        form(json_part(PERSON, "f")),
        [
            '{"name": "\u00e9\U0001f327\\u00f8\\n", "kind": "\u00e9lan \U0001f327"}',
            '{"name":"a","kind":3,"friends":[{"of":-1},{"of": 2, "more": [null]}]}',
            '{\n  "name": "a",\n  "kind": "cat"\n}',
        ],
        {
            '{"name": ""}': '{"name": "',
            '{"kind": "cat"}': '{"',
            '{"name": "a", "kind": "dog"}': '{"name": "a", "kind": "',
            '{"name": "a"': '{"name": "a"',
            '{"name": "a"}': '{"name": "a',
            '{"name": "a", "kind": 3, "friends": [{"of": "x"': '{"name": "a", "kind": 3, "friends": [{"of":',
            '{"name":\n\n"a"': '{"name":',
            "{" + " " * 9: "{ ",
        },
    )


def test_a_schema_of_an_unknown_dialect_is_read_as_the_latest():
    for dialect in ("http://json-schema.org/draft-07/schema#", "http://json-schema.org/schema#", "mine"):
        check(form(json_part({"$schema": dialect, "const": 1}, "f")), ["1"], {"2": ""})


def test_an_answer_keeps_to_an_expression_a_choice_or_a_grammar():
    check(form(regex_part(r"\d{2}/[a-c]+\\?", "f")), ["12/abc", "12/a\\"], {"12/": "12/", "1a": "1"})
    check(form(choice_part(["yes", "yes!", 'no "\n\\'], "f")), ["yes", "yes!", 'no "\n\\'], {"no": "no", "x": ""})
    check(form(lark_part('start: "a" b?\nb: "-" start', "f")), ["a", "a-a-a"], {"a-": "a-", "ab": "a"})
    check(form(lark_part('root ::= "a" ["/] | item+\nitem ::= [0-9] ","', "f")), ['a"', "a/", "1,2,"], {"1": "1"})
    check(form(lark_part(GBNF, "f")), ['{"a": "\u00e9A"\n}'], {'{"b"': '{"', '{"a": "B': '{"a": "'})
    check(form(object_part("f")), ["{}", '{"a": [1.5e3, {"b": null}]}'], {"[]": "", "{}x": "{}"})


def test_a_thought_comes_before_what_was_asked():
    yes = choice_part(["yes"], "f")
    check(form(yes, "inside"), ["Hm.</think>yes", "</think>yes"], {"yes": "yes", "Hm.</think>no": "Hm.</think>"})
    check(form(yes, "before"), ["<think>Hm.</think>yes", "yes"], {"<think>yes": "<think>yes", "Hm.": ""})
    check(form(yes), ["yes"], {"</think>yes": "", "<think>": ""})
    said = 'so </think> and "\n'
    assert accepted(GRAMMARS, form(yes, "inside"), said) == "so </think>"


def test_an_answer_may_be_text_and_then_calls():
    two = section(call("get_weather:0", OSLO), call("add-up:12", '{"x": [1]}'))
    check(
        calls(arguments=STRICT),
        ["", "It rains.", two, "Look: " + two],
        {
            section(): SECTION_BEGIN,
            two + "So": two,
            section(call("get_time:0")): f"{SECTION_BEGIN}{CALL_BEGIN}functions.get",
            section(call("get_weather:0", "{}")): section(call("get_weather:0", "{"))[: -len(CALL_END + SECTION_END)],
            section(call("add-up:0", "[]")): f"{SECTION_BEGIN}{CALL_BEGIN}functions.add-up:0{ARGUMENTS_BEGIN}",
            section(call("add-up:", "{}")): f"{SECTION_BEGIN}{CALL_BEGIN}functions.add-up:",
            CALL_BEGIN: "",
            "Hm.</think>": "Hm.",
        },
    )
    check(calls(), [section(call("get_weather:0", '{"town": 1}'))], {})


def test_calls_are_made_where_they_are_required_and_one_where_one_is_asked_for():
    one = section(call("get_weather:0", OSLO))
    only = one.removesuffix(SECTION_END)
    check(calls(is_required=True), [one, section(call("add-up:0"), call("add-up:1"))], {"": "", "Hi": ""})
    check(calls(is_required=True, is_single=True), [only], {one: only, "Hi": ""})
    check(
        calls(is_single=True),
        [only, "Look: " + only, "Hi"],
        {section(call("add-up:0"), call("add-up:1")): SECTION_BEGIN + call("add-up:0")},
    )


@pytest.mark.parametrize("is_required", [True, False])
def test_a_thought_may_end_by_calling(is_required: bool):
    one = section(call("get_weather:0", OSLO))
    check(calls("inside", is_required=is_required), ["Hm." + one, "Hm.</think>" + one], {"Hm.": "Hm."})
    check(calls("before", is_required=is_required), [one, "<think>Hm." + one], {"<think>Hm.": "<think>Hm."})
    said = "Hm.</think>Hi"
    assert (accepted(GRAMMARS, calls("inside", is_required=is_required), said) is None) == (not is_required)


def test_an_answer_is_calls_or_keeps_to_its_format():
    one = section(call("get_weather:0", OSLO))
    wanted = json_part(PERSON, "f")
    said = '{"name": "a", "kind": 3}'
    for start, thought in ((None, ""), ("inside", "Hm.</think>"), ("before", "<think></think>")):
        grammar = calls(start, wanted, arguments=STRICT)  # pyright: ignore[reportArgumentType]
        check(grammar, [thought + one, thought + said], {thought + "Hi": thought, thought + said + one: thought + said})


def test_the_rest_of_a_forced_call_is_its_arguments():
    grammar = call_grammar(STRICT["get_weather"], SPECIALS)
    check(grammar, [OSLO + CALL_END], {"{}": "{", OSLO: OSLO, OSLO + SECTION_END: OSLO})
    check(call_grammar(None, SPECIALS), ["{}" + CALL_END], {"[]": ""})


def test_equal_requests_have_the_same_grammar():
    assert calls() == answer_grammar(None, Calls(functions=frozenset(sorted(NAMES, reverse=True))), None, SPECIALS)
    assert json.loads(calls(form=json_part(PERSON, "f")))["grammars"][-1]["name"] == "form"


@settings(max_examples=40, deadline=None)
@given(st.text(min_size=1, max_size=12))
@example("<think>")
def test_no_name_or_choice_reaches_beyond_its_place(text: str):
    grammar = answer_grammar(choice_part([text], "f"), Calls(functions=frozenset({text})), None, SPECIALS)
    called = [f"{SECTION_BEGIN}{CALL_BEGIN}", f"functions.{text}:0", f"{ARGUMENTS_BEGIN}{{}}{CALL_END}{SECTION_END}"]
    assert accepted(GRAMMARS, grammar, "", text) is None
    assert accepted(GRAMMARS, grammar, *called) is None
    assert accepted(GRAMMARS, grammar, "", text + "x") is not None


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet='ab/\\"\n{}()[]|*#@<>:TEXT ', max_size=10))
def test_no_expression_or_grammar_reaches_beyond_its_place(text: str):
    for part in (regex_part(text, "f"), lark_part(f"start: {text}", "f")):
        first, *others = json.loads(form(part, "inside"))["grammars"]
        assert first == json.loads(form(choice_part(["a"], "f"), "inside"))["grammars"][0]
        assert [other["name"] for other in others] == ["form"]
        with suppress(GrammarError):
            assert accepted(GRAMMARS, form(part, "inside"), "Hm.</think></think>") == "Hm.</think>"


@pytest.mark.parametrize("text", ["\n" * 200_000, " \n" * 100_000, " " * 200_000], ids=["lines", "both", "spaces"])
def test_white_space_alone_is_no_grammar_and_takes_no_time(text: str):
    begun_s = time.thread_time()
    with pytest.raises(PartError):
        lark_part(text, "grammar")
    assert time.thread_time() - begun_s < 2
