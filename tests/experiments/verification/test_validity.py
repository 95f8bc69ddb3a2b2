"""Which calls are valid: declared, JSON, and by their schema."""

from typing import Any

import pytest

from moonshard.experiments.verification.validity import are_valid, follows
from tests.experiments.verification.scripted import ADD, call

FREE = {"type": "function", "function": {"name": "free"}}
TOOLS = [5, {"type": "retrieval"}, ADD, FREE]


@pytest.mark.parametrize("arguments", ['{"a": 1}', '{"a": 1, "b": "more"}', ' { "a" : -7 } ', {"a": 1}])
def test_arguments_by_the_schema_are_valid(arguments):
    assert are_valid([call(arguments)], TOOLS)


@pytest.mark.parametrize(
    "arguments",
    ["", "{", '{"a": 1', '{"a": "1"}', "{}", "[]", "1", '{"a": NaN}', '{"a": 1} {"a": 2}', "[" * 100_000, None],
)
def test_arguments_that_are_no_json_or_not_by_the_schema_are_invalid(arguments):
    assert not are_valid([call(arguments)], TOOLS)


def test_a_call_of_what_was_not_declared_is_invalid():
    assert not are_valid([call('{"a": 1}', "subtract")], TOOLS)
    assert not are_valid([call('{"a": 1}')], [])


def test_one_invalid_call_makes_the_response_invalid():
    assert are_valid([call('{"a": 1}'), call('{"a": 2}', number=1)], TOOLS)
    assert not are_valid([call('{"a": 1}'), call('{"b": 2}', number=1)], TOOLS)


def test_a_function_without_parameters_takes_any_object():
    assert are_valid([call("{}", "free"), call('{"a": 1}', "free")], TOOLS)
    assert not are_valid([call("[]", "free")], TOOLS)


@pytest.mark.parametrize("calls", [None, [], {}, "calls", [None], [{}], [{"function": None}], [{"function": {}}]])
def test_who_says_it_calls_and_does_not_is_invalid(calls: Any):
    assert not are_valid(calls, TOOLS)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nothing"},
        {"properties": 5},
        {"properties": {"a": {"pattern": "("}}},
        {"$ref": "#/definitions/none"},
        {"$ref": "#"},
        {"$schema": 5},
        [],
        5,
        "object",
        False,
    ],
)
def test_a_schema_that_cannot_be_applied_makes_calls_invalid(schema):
    assert not follows({"a": "1"}, schema)


def test_a_schema_may_name_its_draft_and_refer_to_itself():
    tree = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"node": {"type": "array", "items": {"$ref": "#/definitions/node"}}},
        "$ref": "#/definitions/node",
    }
    assert follows([[], [[]]], tree)
    assert not follows([[], [5]], tree)


def test_no_schema_is_fetched(server):
    assert not follows({"a": 1}, {"$ref": f"{server.url}/schema.json"})
    assert server.keys == set()  # nobody came
