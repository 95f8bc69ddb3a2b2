"""The generators of tool use, agent sessions and small talk: answers are determined, and the splits share nothing."""

import json
import re

import pytest

from moonshard.experiments.training.texts import words
from moonshard.experiments.training.texts.conversation import (
    HELD_OUT,
    TRAIN,
    Conversation,
    Exchange,
    part_of,
    random_of,
)
from moonshard.experiments.training.texts.corpus import pocket_text
from moonshard.experiments.training.texts.lengths import exchange_tokens, opening_tokens
from moonshard.experiments.training.texts.lessons import PocketLessons
from moonshard.experiments.training.texts.recall import UNKNOWN
from moonshard.experiments.training.texts.talk import talk_conversation
from moonshard.experiments.training.texts.talk_topics import ASKING, GREETINGS, TOPICS, USER_FACTS
from moonshard.experiments.training.texts.tools.agent_project import FOLDERS
from moonshard.experiments.training.texts.tools.agents import agent_conversation
from moonshard.experiments.training.texts.tools.tool_library import NO_TOOL, PURPOSES
from moonshard.experiments.training.texts.tools.tools import (
    AGAIN,
    FIRST_CITY,
    LAST_CITY,
    client_conversation,
    tool_conversation,
)
from moonshard.experiments.training.texts.vocabulary import closed_vocabulary

MAKERS = {
    "tools": tool_conversation,
    "clients": client_conversation,
    "agents": agent_conversation,
    "talk": talk_conversation,
}
JSON_TYPES = {"string": str, "integer": int}
every_skill = pytest.mark.parametrize("skill", MAKERS)


def conversations(skill: str, split: str, num: int = 60, num_tokens: int = 512) -> list[Conversation]:
    return [MAKERS[skill](random_of(split, seed, skill), split, num_tokens) for seed in range(num)]


def exchanges(skill: str, split: str, num: int = 60) -> list[Exchange]:
    return [exchange for found in conversations(skill, split, num) for exchange in found.exchanges]


def call_contents(skill: str, split: str, num: int) -> set[str]:
    """The values of each call; a purpose has many names, so names are left out."""
    made = [call for exchange in exchanges(skill, split, num) for part in exchange.rounds for call in part.calls]
    return {json.dumps(list(call.arguments.values())) for call in made}


@every_skill
@pytest.mark.parametrize("split", [TRAIN, HELD_OUT])
def test_the_same_randomness_gives_the_same_conversation(skill: str, split: str) -> None:
    assert conversations(skill, split, num=5) == conversations(skill, split, num=5)
    assert conversations(skill, split, num=2)[0] != conversations(skill, split, num=2)[1]


@pytest.mark.parametrize("num_tokens", [256, 512, 2048])
@every_skill
def test_a_conversation_ends_with_the_exchange_that_passes_its_length(skill: str, num_tokens: int) -> None:
    for found in conversations(skill, TRAIN, num=20, num_tokens=num_tokens):
        lengths = [exchange_tokens(exchange) for exchange in found.exchanges]
        opening = opening_tokens(found.system, found.tools)
        assert opening < num_tokens
        assert opening + sum(lengths[:-1]) < num_tokens <= opening + sum(lengths)


def test_splits_share_no_call_of_an_agent_but_those_of_whole_folders_whose_questions_differ() -> None:
    shared = call_contents("agents", TRAIN, 400) & call_contents("agents", HELD_OUT, 200)
    assert shared <= {json.dumps([folder]) for folder in FOLDERS}
    asked = [{one.question for one in exchanges("agents", split, 200) if one.rounds} for split in (TRAIN, HELD_OUT)]
    assert not asked[0] & asked[1]


def test_every_word_of_the_closed_vocabulary_is_one_token_in_each_of_its_forms() -> None:
    tokenizer = pocket_text().tokenizer
    assert [word for word in closed_vocabulary() if len(tokenizer.encode(word)) > 1] == []


def test_tokens_that_say_the_same_differ_in_a_space() -> None:
    tokenizer = pocket_text().tokenizer
    pairs = PocketLessons(pocket_text(), 0).alike()
    assert all(tokenizer.decode([one]) == f" {tokenizer.decode([other])}" for one, other in pairs)
    first = {word for word in closed_vocabulary() if f" {word}" in closed_vocabulary()}
    assert first <= {tokenizer.decode([other]) for _, other in pairs}
    assert len(first) > 400


def test_splits_share_no_tool_call() -> None:
    purposes = {name: purpose.names[0] for purpose in PURPOSES for name in purpose.names}

    def contents(split: str, num: int) -> set[tuple[str, str]]:
        made = [call for one in exchanges("tools", split, num) for part in one.rounds for call in part.calls]
        return {(purposes[call.name], json.dumps(list(call.arguments.values()))) for call in made}

    assert len(contents(HELD_OUT, 200)) > 500
    assert not contents(TRAIN, 600) & contents(HELD_OUT, 200)


def test_splits_share_no_question_of_talk_but_what_the_user_is_called() -> None:
    asking = {form.format(label=fact.label) for form in ASKING for fact in USER_FACTS}
    train, held_out = ({one.question for one in exchanges("talk", split, 400)} for split in (TRAIN, HELD_OUT))
    assert not (train & held_out) - asking


def test_every_topic_of_talk_is_in_both_splits() -> None:
    for topic in (*TOPICS, *GREETINGS):
        held_out, train = (set(part_of(split, topic.phrasings, topic.answer)) for split in (HELD_OUT, TRAIN))
        assert held_out, topic.answer
        assert len(train) >= 3
        assert held_out | train == set(topic.phrasings)
        assert not held_out & train
    phrasings = [one for topic in (*TOPICS, *GREETINGS) for one in topic.phrasings]
    assert len(phrasings) == len(set(phrasings)), "one question has one answer"


@every_skill
@pytest.mark.parametrize("split", [TRAIN, HELD_OUT])
def test_every_call_is_one_that_was_declared(skill: str, split: str) -> None:
    for found in conversations(skill, split):
        functions = {tool["function"]["name"]: tool["function"]["parameters"] for tool in found.tools}
        assert len(functions) == len(found.tools), "names differ"
        for call in (call for one in found.exchanges for part in one.rounds for call in part.calls):
            properties = functions[call.name]["properties"]
            assert list(json.loads(call.arguments_json())) == list(properties) == functions[call.name]["required"]
            assert all(type(value) is JSON_TYPES[properties[key]["type"]] for key, value in call.arguments.items())


def test_names_of_functions_and_parameters_never_collide() -> None:
    names = [name for purpose in PURPOSES for name in purpose.names]
    assert len(names) == len(set(names))
    for purpose in PURPOSES:
        parameters = [name for parameter in purpose.parameters for name in parameter.names]
        assert len(parameters) == len(set(parameters)), purpose.names[0]


@pytest.mark.parametrize("split", [TRAIN, HELD_OUT])
def test_arguments_stand_in_the_question_and_contents_of_an_answer_in_question_or_result(split: str) -> None:
    fixed = {word for purpose in PURPOSES for word in _words(re.sub(r"\{\w+\}", "", purpose.answer))}
    for exchange in exchanges("tools", split, 200):
        if not exchange.rounds:
            continue
        (part,) = exchange.rounds
        arguments = [str(value) for call in part.calls for value in call.arguments.values()]
        assert all(value in exchange.question for value in arguments)
        if "error" in part.results[0]:
            assert exchange.answer == f"The tool says: {json.loads(part.results[0])['error']}."
            continue
        known = {*fixed, *_words(exchange.question), *_words(" ".join(part.results))}
        assert set(_words(exchange.answer)) <= known, exchange


def _words(text: str) -> list[str]:
    return re.findall(r"-?\w+(?:[:-]\w+)*", text)


@pytest.mark.parametrize("split", [TRAIN, HELD_OUT])
def test_without_a_call_an_answer_is_canonical_or_was_said_before(split: str) -> None:
    talk = {topic.answer for topic in (*TOPICS, *GREETINGS)}
    kinds: set[str] = set()
    for found in conversations("tools", split, 200):
        last = ""
        for exchange in found.exchanges:
            if not exchange.rounds:
                kinds.add(_kind_without_call(exchange, last, talk))
            last = exchange.answer
    assert kinds == {"again", "city", "talk", "refusal"}


def _kind_without_call(exchange: Exchange, last: str, talk: set[str]) -> str:
    if exchange.question in AGAIN:
        assert exchange.answer == last
        return "again"
    if exchange.question in FIRST_CITY + LAST_CITY:
        return "city"
    if exchange.answer in talk:
        return "talk"
    assert exchange.answer in (NO_TOOL, UNKNOWN)
    return "refusal"


@pytest.mark.parametrize("split", [TRAIN, HELD_OUT])
def test_the_first_and_the_last_city_are_those_of_the_questions(split: str) -> None:
    num_asked = 0
    for found in conversations("tools", split, 200):
        cities: list[str] = []
        for exchange in found.exchanges:
            if exchange.question in FIRST_CITY + LAST_CITY:
                name, city = ("first", cities[0]) if exchange.question in FIRST_CITY else ("last", cities[-1])
                assert exchange.answer == f"The {name} city was {city}."
                num_asked += 1
            cities += [word for word in _words(exchange.question) if word in words.CITIES]
    assert num_asked > 5


def test_what_no_tool_serves_is_refused_and_what_one_serves_is_called() -> None:
    for found in conversations("tools", TRAIN, 200):
        declared = {tool["function"]["name"] for tool in found.tools}
        served = [purpose for purpose in PURPOSES if declared & set(purpose.names)]
        forms = [re.sub(r"\\\{\w+\\\}", ".+", re.escape(form)) for purpose in served for form in purpose.questions]
        for exchange in found.exchanges:
            if exchange.answer == NO_TOOL and exchange.question not in AGAIN:
                assert not any(re.fullmatch(form, exchange.question) for form in forms), (declared, exchange)


@pytest.mark.parametrize("split", [TRAIN, HELD_OUT])
def test_a_file_is_read_once_and_answers_stand_in_what_was_read(split: str) -> None:
    num_answered = 0
    for found in conversations("agents", split, 100, num_tokens=1500):
        paths_read: set[str] = set()
        text = ""
        for exchange in found.exchanges:
            read = [str(call.arguments.get("path", call.arguments.get("file"))) for call in _reads(exchange)]
            assert not paths_read & set(read), "read again"
            paths_read |= set(read)
            results = [result for part in exchange.rounds for result in part.results]
            text += "\n".join([exchange.question, *results, ""])
            num_answered += not exchange.rounds
            if (fact := re.fullmatch(r"In (\S+), (.+?) (?:is|has to|takes) (.+)\.", exchange.answer)) is not None:
                path, about, value = fact.groups()
                assert path in text
                assert about in exchange.question
                assert any(about in line and value in line for line in text.splitlines())
    assert num_answered > 100


def _reads(exchange: Exchange) -> list:
    return [
        call
        for part in exchange.rounds
        for call in part.calls
        if call.name in ("read_file", "open_file", "show_file", "write_file", "save_file")
    ]


@pytest.mark.parametrize("split", [TRAIN, HELD_OUT])
def test_what_the_user_said_is_known_and_nothing_else_of_them(split: str) -> None:
    asked = {form.format(label=fact.label): fact.label for form in ASKING for fact in USER_FACTS}
    outcomes: set[bool] = set()
    for found in conversations("talk", split, 100):
        told: dict[str, str] = {}
        for exchange in found.exchanges:
            if exchange.question in asked:
                label = asked[exchange.question]
                assert exchange.answer == told.get(label, UNKNOWN)
                outcomes.add(label in told)
            elif (said := re.search(r"\bmy ([\w ]+) is (.+)\.$", exchange.question, re.IGNORECASE)) is not None:
                told[said[1]] = exchange.answer
                assert said[2] in exchange.answer
    assert outcomes == {True, False}


@every_skill
def test_ids_of_calls_are_counted_over_the_conversation(skill: str) -> None:
    for found in conversations(skill, TRAIN, num=20):
        calls = [call for message in found.messages() for call in message.get("tool_calls", ())]
        assert [int(call["id"].rsplit(":", 1)[1]) for call in calls] == list(range(len(calls)))
        answered = [message["tool_call_id"] for message in found.messages() if message["role"] == "tool"]
        assert answered == [call["id"] for call in calls]
