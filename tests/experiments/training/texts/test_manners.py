"""However a client writes what its tools say, it means the same: answers follow from it, and declarations hold."""

import json
import re
from random import Random

import pytest

from moonshard.experiments.training.texts.conversation import HELD_OUT, TRAIN, Conversation, random_of
from moonshard.experiments.training.texts.manners import COMPACT, ENVELOPES, PLAIN, RULES, Manner
from moonshard.experiments.training.texts.tools.tool_library import PURPOSES
from moonshard.experiments.training.texts.tools.tools import client_conversation

RESULT, ARGUMENTS = {"degrees": 13, "sky": "rainy"}, {"city": "Lima"}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}, "required": []}},
}
WRITTEN = {
    '{"degrees": 13, "sky": "rainy"}': PLAIN,
    '{"degrees":13,"sky":"rainy"}': Manner(separators=COMPACT),
    '{\n  "degrees": 13,\n  "sky": "rainy"\n}': Manner(indent=2),
    '{"degrees": "13", "sky": "rainy"}': Manner(has_numbers_as_strings=True),
    '{"city": "Lima", "degrees": 13, "sky": "rainy"}': Manner(has_echo=True),
    '{"ok":true,"data":{"degrees":13,"sky":"rainy"}}': Manner(separators=COMPACT, envelope="data", state={"ok": True}),
    '{"degrees": 13, "details": {"sky": "rainy"}}': Manner(nests=True),
}


def conversations(split: str, num: int) -> list[Conversation]:
    return [client_conversation(random_of(split, seed, "clients"), split, 512) for seed in range(num)]


@pytest.mark.parametrize(("text", "manner"), WRITTEN.items())
def test_a_result_is_written_in_its_manner(text: str, manner: Manner):
    assert manner.written(Random(0), RESULT, ARGUMENTS) == text


def test_a_single_value_may_stand_alone_and_keys_in_any_order():
    assert Manner(is_bare=True).written(Random(0), {"status": "late"}, ARGUMENTS) == "late"
    assert Manner(is_bare=True).written(Random(0), {"km": 7.5}, ARGUMENTS) == "7.5"
    orders = {Manner(is_shuffled=True).written(Random(seed), RESULT, ARGUMENTS) for seed in range(20)}
    assert {tuple(json.loads(order)) for order in orders} == {("degrees", "sky"), ("sky", "degrees")}


def test_a_declaration_means_the_same_in_every_manner():
    assert PLAIN.declared(Random(0), TOOL) == TOOL
    strict = Manner(has_description=False, is_strict=True, is_shuffled=True).declared(Random(0), TOOL)["function"]
    assert "description" not in strict
    assert (strict["name"], strict["strict"], strict["parameters"]["additionalProperties"]) == ("f", True, False)


@pytest.mark.parametrize("split", [TRAIN, HELD_OUT])
def test_an_answer_says_what_stands_in_the_question_or_the_result(split: str):
    fixed = {word for purpose in PURPOSES for word in _words(re.sub(r"\{\w+\}", "", purpose.answer))}
    for exchange in (one for found in conversations(split, 200) for one in found.exchanges if one.rounds):
        (part,) = exchange.rounds
        known = {*fixed, *_words(exchange.question), *_words(" ".join(part.results)), "The", "tool", "says"}
        assert set(_words(exchange.answer)) <= known, exchange


def test_every_manner_is_met():
    found = conversations(TRAIN, 300)
    results = [
        result for one in found for exchange in one.exchanges for part in exchange.rounds for result in part.results
    ]
    declared = [tool["function"] for one in found for tool in one.tools]
    seen = {
        "compact": any('":"' in result for result in results),
        "spaced": any('": "' in result and "\n" not in result for result in results),
        "indented": any("\n" in result for result in results),
        "bare": any(not result.startswith("{") for result in results),
        "decimals": any(re.search(r"\d\.\d", result) for result in results),
        "nested": any('"details"' in result for result in results),
        "wrapped": any(f'"{name}"' in result for name in ENVELOPES for result in results),
        "no description": any("description" not in function for function in declared),
        "strict": any(function.get("strict") for function in declared),
        "titles": any("title" in str(function["parameters"]) for function in declared),
        "rules": any((one.system or "").startswith(RULES[0]) for one in found),
    }
    assert all(seen.values()), seen


def _words(text: str) -> list[str]:
    return re.findall(r"-?\w+(?:[:.-]\w+)*", text)
