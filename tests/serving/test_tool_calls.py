"""What a model writes becomes content and calls: the same however it is cut, with nothing lost and nothing made up."""

import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moonshard.serving.tool_calls import (
    ARGUMENTS_BEGIN,
    CALL_BEGIN,
    CALL_END,
    MARKS,
    NAMES,
    SECTION_BEGIN,
    SECTION_END,
    Parsed,
    ToolCall,
    ToolCallParser,
    call_marks,
    spelt,
)

FUNCTIONS = ("get_weather", "add-up", "files.read")


def call(call_id: str = "functions.get_weather:0", arguments: str = '{"city": "Oslo"}') -> str:
    return f"{CALL_BEGIN}{call_id}{ARGUMENTS_BEGIN}{arguments}{CALL_END}"


def section(*calls: str) -> str:
    return SECTION_BEGIN + "".join(calls) + SECTION_END


def parse(text: str, sizes: list[int] | None = None, call_ids: tuple[str, ...] = ()) -> Parsed:
    """The whole parse of the text, pushed in pieces of these sizes and a rest."""
    parser = ToolCallParser(FUNCTIONS, call_ids)
    parts: list[Parsed] = []
    for size in sizes or ():
        parts.append(parser.push(text[:size]))
        text = text[size:]
    parts += [parser.push(text), Parsed(content=parser.finish())]
    calls = [made for part in parts for made in part.calls]
    return Parsed(content="".join(part.content for part in parts), calls=tuple(calls))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
json_objects = st.builds(
    json.dumps, st.dictionaries(st.text(max_size=6), json_values, max_size=3), ensure_ascii=st.booleans()
)
plain = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [" ", "\n", "}", "{", ":", "functions.", "get_weather:0", "functions.get_weather:1", "{}", "[]", *NAMES.values()]
)
good_calls = st.builds(
    lambda name, index, arguments, pad: call(f"{pad}functions.{name}:{index}{pad}", pad + arguments + pad) + pad,
    st.sampled_from(FUNCTIONS),
    st.integers(0, 12),
    json_objects,
    st.sampled_from(["", "\n", " "]),
)
calls = good_calls | st.builds(call, plain, plain | json_objects)
garbage = st.lists(st.sampled_from(MARKS) | plain, max_size=8).map("".join)
sections = st.lists(calls | garbage, max_size=3).map(lambda inner: section(*inner))
answers = st.lists(plain | sections | garbage, max_size=5).map("".join)
cuts = st.lists(st.integers(0, 9), max_size=60)


@given(text=answers, sizes=cuts)
@example(text="a" + section(call()) + "b", sizes=[1] * 80)
def test_what_comes_out_does_not_depend_on_how_the_text_is_cut(text: str, sizes: list[int]):
    assert parse(text, sizes) == parse(text)


@given(text=answers)
@example(text=section(call(), CALL_BEGIN) + section(call()))
def test_content_and_calls_together_are_the_text(text: str):
    parser = ToolCallParser(FUNCTIONS)
    told = ""
    for piece in (parser.push(char) for char in text):  # one by one, so that calls stay where they were
        if piece.calls:
            told += spelt(section(*(call(made.id, made.arguments) for made in piece.calls)))
        told += piece.content
    assert bare(told + parser.finish()) == bare(spelt(text))


def bare(text: str) -> str:
    """Without what a call may be written differently in: white space, the prefix, the number."""
    without = re.sub(r"\s|functions\.", "", text)
    return re.sub(rf":[0-9]+(?={re.escape(NAMES[ARGUMENTS_BEGIN])})", "", without)


@given(before=plain, after=plain, written=st.lists(st.tuples(st.sampled_from(FUNCTIONS), json_objects), min_size=1))
def test_valid_calls_are_taken_out_as_they_were_written(before: str, after: str, written: list[tuple[str, str]]):
    made = [ToolCall(id=f"functions.{name}:{i}", name=name, arguments=text) for i, (name, text) in enumerate(written)]
    text = before + section(*(call(one.id, one.arguments) for one in made)) + after
    assert parse(text) == Parsed(content=before + after, calls=tuple(made))


@pytest.mark.parametrize(
    "broken",
    [
        section(),
        section(call("functions.get_time:0")),
        section(call("functions.get_weather")),
        section(call("functions.get_weather:")),
        section(call("functions.get_weather:\u0661")),
        section(call("0")),
        section(call("")),
        section(call(arguments="")),
        section(call(arguments="[1]")),
        section(call(arguments='"text"')),
        section(call(arguments='{"city": }')),
        section(call(arguments='{"city": "Oslo"')),
        section(call(arguments='{"city": "Oslo"}}')),
        section(call(arguments='{"n": NaN}')),
        section(call(arguments='{"half": "\\ud83d"}')),
        section(call(arguments="{'city': 'Oslo'}")),
        section(call(arguments='{"deep": ' + "[" * 100_000 + "]" * 100_000 + "}")),
        section(call(), call("functions.get_time:1")),
        section(call("functions.get_time:0"), call("functions.get_weather:1")),
        section(call(), "and ", call("functions.get_weather:1")),
        section("Now: ", call()),
        section(call(), "done"),
        section(call() + CALL_END),
        section(CALL_BEGIN + call()),
        section(f"{ARGUMENTS_BEGIN}{{}}{CALL_END}"),
        section(f"{CALL_BEGIN}functions.get_weather:0{CALL_END}"),
        SECTION_BEGIN,
        SECTION_BEGIN + call(),
        section(call())[:-2],
        SECTION_BEGIN + SECTION_END + SECTION_END,
        call(),
        call() + SECTION_END,
        spelt(section(call())),
    ],
)
def test_what_is_no_valid_section_is_text_as_it_is(broken: str):
    assert parse("a" + broken) == Parsed(content="a" + spelt(broken))


def test_a_section_after_a_broken_one_is_found():
    broken = SECTION_BEGIN + call() + CALL_BEGIN
    parsed = parse(broken + section(call()) + section(call("functions.add-up:1", "{}")))
    assert parsed.content == spelt(broken)
    assert [made.name for made in parsed.calls] == ["get_weather", "add-up"]


def test_content_leaves_at_once_and_a_section_only_when_all_of_it_is_valid():
    parser = ToolCallParser(FUNCTIONS)
    assert parser.push("Let me see. " + SECTION_BEGIN) == Parsed(content="Let me see. ")
    assert parser.push(call()) == Parsed(content="")
    assert parser.push(call("functions.add-up:1", "{}")) == Parsed(content="")
    assert len(parser.push(SECTION_END).calls) == 2
    assert parser.push("b") == Parsed(content="b")


def test_a_fault_lets_go_of_the_section_at_once():
    parser = ToolCallParser(FUNCTIONS)
    assert parser.push(SECTION_BEGIN + call()).content == ""
    assert parser.push("so").content == spelt(SECTION_BEGIN + call() + "so")
    assert parser.push("on").content == "on"


@pytest.mark.parametrize(
    ("written", "call_ids", "ids"),
    [
        (["functions.get_weather:0"], (), ["functions.get_weather:0"]),
        (["functions.get_weather:7"], (), ["functions.get_weather:7"]),
        (["get_weather:3"], (), ["functions.get_weather:3"]),
        (["functions.files.read:0", "files.read:1"], (), ["functions.files.read:0", "functions.files.read:1"]),
        (["functions.get_weather:0"] * 3, (), [f"functions.get_weather:{i}" for i in range(3)]),
        (["functions.get_weather:0"], ("functions.get_weather:0",), ["functions.get_weather:1"]),
        (["functions.get_weather:0"], ("functions.get_weather:0", "call_1"), ["functions.get_weather:2"]),
        (
            ["functions.get_weather:0"],
            ("functions.get_weather:0", "functions.get_weather:2"),
            ["functions.get_weather:3"],
        ),
        (["functions.add-up:0"], ("functions.get_weather:0",), ["functions.add-up:0"]),
    ],
)
def test_an_id_is_the_models_own_and_never_one_that_is_taken(
    written: list[str], call_ids: tuple[str, ...], ids: list[str]
):
    assert [made.id for made in parse(section(*map(call, written)), call_ids=call_ids).calls] == ids


def test_white_space_between_markers_is_nobodys():
    text = section("\n", call(" functions.get_weather:0\n", '\n{"a": " b "} '), "\n\n")
    (made,) = parse(text).calls
    assert (made.id, made.arguments) == ("functions.get_weather:0", '{"a": " b "}')


def test_a_function_may_be_declared_with_the_prefix_in_its_name():
    parser = ToolCallParser(["functions.x"])
    assert [made.name for made in parser.push(section(call("functions.x:0", "{}"))).calls] == ["functions.x"]


def test_a_vocabulary_without_one_of_the_markers_has_no_tool_calls():
    special_tokens = {name: 100 + i for i, name in enumerate(NAMES.values())}
    assert call_marks(special_tokens) == {100 + i: mark for i, mark in enumerate(MARKS)}
    for name in special_tokens:
        assert call_marks({other: i for other, i in special_tokens.items() if other != name}) == {}
