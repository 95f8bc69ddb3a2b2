"""Graders tell right from wrong, and nothing but the meaning of a call counts."""

import math

import pytest

from moonshard.experiments.common.turns import WrittenCall
from moonshard.experiments.evaluation.grading import (
    attempts_calls,
    has_whole_calls,
    is_answer,
    parsed_object,
    results_of,
)
from moonshard.experiments.evaluation.replies import Reply
from moonshard.experiments.training.texts.conversation import Call, CallRound
from moonshard.serving.chat.tool_calls import (
    ARGUMENTS_BEGIN,
    CALL_BEGIN,
    SECTION_BEGIN,
    ToolCallParser,
)

CALL = '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
TEXT = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"


def written(name: str = "add", arguments: str = '{"a": 1, "b": "x"}', index: int = 0) -> WrittenCall:
    return WrittenCall(id=f"functions.{name}:{index}", name=name, arguments=arguments)


def reply(*calls: WrittenCall, content: str = "") -> Reply:
    return Reply(content=content, calls=calls)


ONE = CallRound(calls=(Call(name="add", arguments={"a": 1, "b": "x"}),), results=("r",))
TWO = CallRound(
    calls=(Call(name="add", arguments={"a": 1}), Call(name="add", arguments={"a": 2})), results=("first", "second")
)


def test_an_answer_is_right_to_the_letter_but_for_white_space_around_it():
    assert is_answer(reply(content=" The desk is A1.\n"), "The desk is A1.")
    for wrong in ("The desk is A2.", "The desk is A1", "the desk is A1.", "The  desk is A1.", ""):
        assert not is_answer(reply(content=wrong), "The desk is A1.")
    assert not is_answer(reply(written(), content="The desk is A1."), "The desk is A1.")


@pytest.mark.parametrize("arguments", ['{"a": 1, "b": "x"}', '{"b":"x","a":1}', ' {"a": 1,\n"b": "\\u0078"} '])
def test_a_call_is_right_however_its_json_is_spelt(arguments):
    assert results_of(reply(written(arguments=arguments)), ONE) == ["r"]


@pytest.mark.parametrize(
    "wrong",
    [
        reply(),
        reply(content="The answer."),
        reply(written(name="sub")),
        reply(written(arguments='{"a": 2, "b": "x"}')),
        reply(written(arguments='{"a": "1", "b": "x"}')),
        reply(written(arguments='{"a": true, "b": "x"}')),
        reply(written(arguments='{"a": 1.0, "b": "x"}')),
        reply(written(arguments='{"a": 1}')),
        reply(written(arguments='{"a": 1, "b": "x", "c": 0}')),
        reply(written(arguments='{"a": 1, "b": "x"')),
        reply(written(), written(index=1)),
        reply(written(), content=TEXT.format(CALL)),
    ],
)
def test_any_other_call_is_wrong(wrong):
    assert results_of(wrong, ONE) is None


def test_each_of_two_calls_gets_its_own_result_in_either_order():
    one, two = written(arguments='{"a": 1}'), written(arguments='{"a": 2}', index=1)
    assert results_of(reply(one, two), TWO) == ["first", "second"]
    assert results_of(reply(two, one), TWO) == ["second", "first"]
    assert results_of(reply(one), TWO) is None
    assert results_of(reply(one, one), TWO) is None


def test_words_beside_right_calls_are_no_fault():
    assert results_of(reply(written(), content="Let me see."), ONE) == ["r"]


@pytest.mark.parametrize(
    "whole",
    [
        reply(written()),
        reply(written(), written(index=1)),
        reply(content=TEXT.format(CALL)),  # of a function nobody declared
        reply(content="So: " + TEXT.format(CALL + "\n" + CALL)),
    ],
)
def test_calls_with_json_objects_are_whole(whole):
    assert attempts_calls(whole)
    assert has_whole_calls(whole)


@pytest.mark.parametrize(
    "broken",
    [
        reply(content="I shall not call."),
        reply(content=TEXT.format("")),
        reply(content=TEXT.format(CALL.replace('{"a": 1}', '{"a": 1'))),
        reply(content=TEXT.format(CALL.replace('{"a": 1}', "[1]"))),
        reply(content=TEXT.format(CALL.replace("1", "NaN"))),
        reply(content=TEXT.format(CALL + CALL.replace('{"a": 1}', "a"))),
        reply(content=TEXT.format(CALL).removesuffix("<|tool_calls_section_end|>")),
        reply(content=TEXT.format(CALL.replace("<|tool_call_end|>", ""))),
        reply(content=TEXT.format(CALL.replace("<|tool_call_argument_begin|>", ""))),
        reply(content=CALL),
        reply(written(), content=TEXT.format(CALL) + "<|tool_call_end|>"),
        reply(written(), content=TEXT.format(CALL.replace('{"a": 1}', "a"))),
        reply(written(arguments="1")),
        reply(written(arguments='{"a": NaN}')),
        reply(written(arguments='{"a": [-Infinity]}')),
    ],
)
def test_calls_that_are_cut_off_or_no_json_are_not_whole(broken):
    assert not has_whole_calls(broken)


@pytest.mark.parametrize(
    "arguments", ['{"a": NaN}', '{"a": Infinity}', '{"a": [-Infinity]}', "{", "[]", "null", '{"a": 1}']
)
def test_arguments_are_an_object_exactly_where_the_serving_parser_takes_them_as_whole(arguments):
    parser = ToolCallParser(["add"])
    parsed = parser.push(SECTION_BEGIN + CALL_BEGIN + "functions.add:0" + ARGUMENTS_BEGIN + arguments)
    assert (parsed_object(arguments) is not None) == (bool(parsed.calls) and not parser.is_cut)


def test_a_call_with_nan_is_not_even_the_expected_one():
    nan = CallRound(calls=(Call(name="add", arguments={"a": math.nan}),), results=("r",))
    assert results_of(reply(written(arguments='{"a": NaN}')), nan) is None
