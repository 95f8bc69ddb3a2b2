"""What a model writes becomes content and calls: the same however it is cut, with nothing lost and nothing made up."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moonshard.rpc.codec import whole_calls
from moonshard.rpc.types import ToolCall, ToolCallPart
from moonshard.serving.chat.tool_calls import (
    ARGUMENTS_BEGIN,
    CALL_BEGIN,
    CALL_END,
    MARKS,
    NAMES,
    SECTION_BEGIN,
    SECTION_END,
    Parsed,
    ToolCallParser,
    call_marks,
    spelt,
)

FUNCTIONS = ("get_weather", "add-up", "files.read")


def call(call_id: str = "functions.get_weather:0", arguments: str = '{"city": "Oslo"}') -> str:
    return f"{CALL_BEGIN}{call_id}{ARGUMENTS_BEGIN}{arguments}{CALL_END}"


def section(*calls: str) -> str:
    return SECTION_BEGIN + "".join(calls) + SECTION_END


@dataclass(frozen=True, kw_only=True)
class Answer:
    content: str
    calls: tuple[ToolCall, ...] = ()
    is_cut: bool = False


def parse(
    text: str, sizes: list[int] | None = None, call_ids: tuple[str, ...] = (), max_calls: int | None = None
) -> Answer:
    """The whole parse of the text, pushed in pieces of these sizes and a rest."""
    parser = ToolCallParser(FUNCTIONS, call_ids, max_calls=max_calls)
    parsed: list[Parsed] = []
    for size in sizes or ():
        parsed.append(parser.push(text[:size]))
        text = text[size:]
    parsed += [parser.push(text), parser.finish()]
    return Answer(
        content="".join(part.content for part in parsed),
        calls=whole(part for push in parsed for part in push.calls),
        is_cut=parser.is_cut,
    )


def whole(parts: Iterable[ToolCallPart]) -> tuple[ToolCall, ...]:
    """As a client adds them up: each call's first part has its id and name, the others more of its arguments."""
    parts, num_calls = list(parts), 0
    for part in parts:
        num_calls += bool(part.id)
        assert part.index == num_calls - 1
        assert bool(part.name) == bool(part.id) == (not part.arguments)
    return whole_calls(parts)


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


@given(text=answers, sizes=cuts)
@example(text=section(call(), CALL_BEGIN) + section(call()), sizes=[1] * 200)
def test_content_and_calls_together_are_the_text(text: str, sizes: list[int]):
    parsed = parse(text, sizes)
    told = parsed.content + "".join(f"{made.name}{made.arguments}" for made in parsed.calls)
    assert sorted(bare(told)) == sorted(bare(spelt(text)))


def bare(text: str) -> str:
    """Without what is not told of a call, and what it may be written differently in: white space, prefix, number."""
    without = re.sub(r"\s|functions\.|:[0-9]+", "", text)
    return re.sub("|".join(map(re.escape, NAMES.values())), "", without)


@given(before=plain, after=plain, written=st.lists(st.tuples(st.sampled_from(FUNCTIONS), json_objects), min_size=1))
def test_valid_calls_are_taken_out_as_they_were_written(before: str, after: str, written: list[tuple[str, str]]):
    made = [ToolCall(id=f"functions.{name}:{i}", name=name, arguments=text) for i, (name, text) in enumerate(written)]
    text = before + section(*(call(one.id, one.arguments) for one in made)) + after
    assert parse(text) == Answer(content=before + after, calls=tuple(made))


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
        section(call("functions.get_time:0"), call("functions.get_weather:1")),
        section("Now: ", call()),
        section(CALL_BEGIN + call()),
        section(f"{ARGUMENTS_BEGIN}{{}}{CALL_END}"),
        section(f"{CALL_BEGIN}functions.get_weather:0{CALL_END}"),
        SECTION_BEGIN,
        SECTION_BEGIN + SECTION_END + SECTION_END,
        call(),
        call() + SECTION_END,
        spelt(section(call())),
    ],
)
def test_what_is_no_valid_section_is_text_as_it_is(broken: str):
    assert parse("a" + broken) == Answer(content="a" + spelt(broken))


ONE = ToolCall(id="functions.get_weather:0", name="get_weather", arguments='{"city": "Oslo"}')
OPEN = f"{CALL_BEGIN}functions.get_weather:0{ARGUMENTS_BEGIN}"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (SECTION_BEGIN + call(), ""),
        (SECTION_BEGIN + call() + " \n", ""),
        (SECTION_BEGIN + call().removesuffix(CALL_END), ""),
        (SECTION_BEGIN + call().removesuffix(CALL_END) + SECTION_END + "b", "b"),
        (section(call(), "done"), spelt("done" + SECTION_END)),
        (section(call() + CALL_END), spelt(CALL_END + SECTION_END)),
        (section(call(), call("functions.get_time:1")), spelt(call("functions.get_time:1") + SECTION_END)),
        (SECTION_BEGIN + call() + CALL_BEGIN + "functions.get", spelt(CALL_BEGIN + "functions.get")),
    ],
)
def test_a_call_that_is_whole_is_one_whatever_follows(text: str, content: str):
    assert parse("a" + text) == Answer(content="a" + content, calls=(ONE,))


@pytest.mark.parametrize("between", ["", CALL_END, CALL_END + "\n"])
def test_a_call_may_lack_its_end_before_the_next_one(between: str):
    second = call("functions.add-up:1", "{}")
    parsed = parse(SECTION_BEGIN + OPEN + ONE.arguments + between + second + SECTION_END)
    assert [(made.name, made.arguments) for made in parsed.calls] == [("get_weather", ONE.arguments), ("add-up", "{}")]
    assert (parsed.content, parsed.is_cut) == ("", False)


@pytest.mark.parametrize("arguments", ['{"city": "Os', "{", '{"city": "Oslo"', '{"deep": ' + "[" * 100_000])
def test_a_call_that_is_cut_off_is_told_as_far_as_it_came(arguments: str):
    assert parse(SECTION_BEGIN + OPEN + arguments + " ") == Answer(
        content="", calls=(replace(ONE, arguments=arguments),), is_cut=True
    )


@pytest.mark.parametrize(
    "begun", ["", CALL_BEGIN, CALL_BEGIN + "functions.get_wea", OPEN, OPEN + " ", call(), call() + CALL_BEGIN]
)
def test_of_a_section_cut_off_between_calls_no_marker_is_left_as_text(begun: str):
    parser = ToolCallParser(FUNCTIONS)
    pushed = parser.push("a" + SECTION_BEGIN + begun)
    rest = parser.finish(is_cut_off=True)
    assert (pushed.content + rest.content, rest.calls) == ("a", ())
    assert len(whole(pushed.calls)) == begun.startswith(call())


@pytest.mark.parametrize("arguments", ['{"city": }', '{"city": "Oslo"}}', "{'city': 'Oslo'}", '{"n": NaN}'])
def test_arguments_that_begin_as_an_object_are_told_as_they_are(arguments: str):
    """They are told before their end is known, and are the client's to check, as with OpenAI."""
    assert parse(section(call(arguments=arguments))).calls == (replace(ONE, arguments=arguments),)


def test_calls_beyond_the_most_there_may_be_are_dropped():
    text = section(call(), call("functions.add-up:1", "{}")) + "b" + section(call())
    assert parse(text, max_calls=1) == Answer(content="b", calls=(ONE,))
    assert not parse(SECTION_BEGIN + call() + OPEN + '{"a"', max_calls=1).is_cut


def test_a_section_after_a_broken_one_is_found():
    broken = SECTION_BEGIN + "so " + CALL_BEGIN
    parsed = parse(broken + section(call()) + section(call("functions.add-up:1", "{}")))
    assert parsed.content == spelt(broken)
    assert [made.name for made in parsed.calls] == ["get_weather", "add-up"]


def test_content_leaves_at_once_and_so_does_a_call_once_it_is_one():
    parser = ToolCallParser(FUNCTIONS)
    assert parser.push("Let me see. " + SECTION_BEGIN) == Parsed(content="Let me see. ")
    assert parser.push(OPEN + "\n") == Parsed(content="")
    begun = ToolCallPart(index=0, id=ONE.id, name=ONE.name)
    assert parser.push('{"ci') == Parsed(content="", calls=(begun, ToolCallPart(index=0, arguments='{"ci')))
    assert parser.push("ty ") == Parsed(content="", calls=(ToolCallPart(index=0, arguments="ty"),))
    assert parser.push("\n") == Parsed(content="")
    assert parser.push(":1}") == Parsed(content="", calls=(ToolCallPart(index=0, arguments=" \n:1}"),))
    assert parser.push(CALL_END + SECTION_END + "b") == Parsed(content="b")


def test_a_fault_lets_go_of_what_is_held_at_once():
    parser = ToolCallParser(FUNCTIONS)
    assert parser.push(SECTION_BEGIN + " ").content == ""
    assert parser.push("so").content == spelt(SECTION_BEGIN + " so")
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
    assert [made.name for made in whole(parser.push(section(call("functions.x:0", "{}"))).calls)] == ["functions.x"]


def test_a_vocabulary_without_one_of_the_markers_has_no_tool_calls():
    special_tokens = {name: 100 + i for i, name in enumerate(NAMES.values())}
    assert call_marks(special_tokens) == {100 + i: mark for i, mark in enumerate(MARKS)}
    for name in special_tokens:
        assert call_marks({other: i for other, i in special_tokens.items() if other != name}) == {}
