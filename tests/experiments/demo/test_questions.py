"""The demo's questions can be answered from what it shows, and it knows a right answer from a wrong one."""

import json

import pytest

from moonshard.experiments.demo.questions import DocumentQuestion, Question, document_question, weather_questions
from moonshard.experiments.demo.script import verdict
from moonshard.experiments.demo.toolbox import CITIES, FUNCTIONS, MULTIPLY, TIME, WEATHER, declared, run_tool
from moonshard.experiments.training.texts.conversation import HELD_OUT, Call, is_of

SEEDS = range(12)


async def count_words(text: str) -> int:
    return len(text.split())


async def about(seed: int, num_tokens: int = 700) -> DocumentQuestion:
    return await document_question(seed, num_tokens, count_words)


@pytest.mark.parametrize("seed", SEEDS)
async def test_the_answer_about_a_document_stands_in_the_line_that_is_named(seed: int):
    found = await about(seed)
    (fact,) = (fact for fact in found.document.facts if fact.answer == found.question.answer)
    line = found.document.lines[found.line - 1]
    assert fact.key in line
    assert fact.value in line
    assert fact.key in found.question.text
    assert found.prompt.startswith(found.document.text)
    assert is_of(HELD_OUT, fact.key, *(f.value for f in found.document.facts if f.key == fact.key))


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_document_is_about_as_long_as_asked_by_the_servers_own_count(seed: int):
    found = await about(seed)
    assert found.num_tokens == await count_words(found.document.text)
    assert found.num_tokens == pytest.approx(700, rel=0.1)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_follow_up_names_another_city_and_not_what_is_asked_of_it(seed: int):
    first, second = weather_questions(seed)
    assert first.calls[0].name == second.calls[0].name == WEATHER
    assert first.calls != second.calls
    assert "weather" in first.text
    assert "weather" not in second.text
    assert all(is_of(HELD_OUT, WEATHER, question.calls[0].arguments["city"]) for question in (first, second))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_right_answer_says_what_the_tool_returns(seed: int):
    for question in weather_questions(seed):
        result = json.loads(run_tool(question.calls[0]))
        assert result.keys() == {"degrees", "sky"}
        assert all(str(value) in question.answer for value in result.values())


def test_every_tool_returns_what_its_declaration_promises():
    arguments = {WEATHER: {"city": "Oslo"}, TIME: {"city": "Lima"}, MULTIPLY: {"a": 6, "b": 7}}
    assert arguments.keys() == FUNCTIONS.keys()
    for name, given in arguments.items():
        assert json.loads(run_tool(Call(name=name, arguments=given))).keys() == declared(name).purpose.result.keys()
    assert run_tool(Call(name=MULTIPLY, arguments=arguments[MULTIPLY])) == '{"product": 42}'


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        (WEATHER, {"city": "Atlantis"}, "unknown city"),
        (WEATHER, {"city": ["Oslo"]}, "unknown city"),
        (WEATHER, {"town": "Oslo"}, "wrong arguments"),
        (WEATHER, {"city": "Oslo", "day": "Monday"}, "wrong arguments"),
        (WEATHER, {}, "wrong arguments"),
        (MULTIPLY, {"a": "6", "b": 7}, "not a number"),
        ("get_moon", {}, "unknown tool"),
    ],
)
def test_a_call_that_makes_no_sense_returns_an_error_and_raises_nothing(name: str, arguments: dict, error: str):
    assert json.loads(run_tool(Call(name=name, arguments=arguments))) == {"error": error}


def test_right_is_the_right_words_after_the_right_calls_alone():
    oslo, lima = (Call(name=WEATHER, arguments={"city": city}) for city in ("Oslo", "Lima"))
    question = Question(text="?", answer="It is 4 degrees.", calls=(oslo,))
    assert verdict(question, "It is 4 degrees.", [oslo]) == "✓ right"
    for answer, calls in (("It is 5 degrees.", [oslo]), ("It is 4 degrees.", [lima]), ("It is 4 degrees.", [])):
        said = verdict(question, answer, calls)
        assert said.startswith("✗ wrong")
        assert said.endswith('calls get_weather {"city": "Oslo"}, then It is 4 degrees.')


def test_the_weather_of_enough_cities_is_held_out():
    assert sum(is_of(HELD_OUT, WEATHER, city) for city in CITIES) >= 2
