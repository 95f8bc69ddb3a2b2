"""Held-out tasks: the same for everyone, apart from what was trained on, as long as they say, and answerable."""

import json
import re
from collections import Counter

import pytest

from moonshard.experiments.training.texts.conversation import HELD_OUT, TRAIN, Call, is_of, part_of, random_of
from moonshard.experiments.training.texts.corpus import pocket_text
from moonshard.experiments.training.texts.recall import DOMAINS, UNKNOWN, document, unknown_fact
from moonshard.experiments.training.texts.tools.agents import LISTINGS, RUNS, TOOLS
from moonshard.experiments.training.texts.tools.tasks import (
    MAX_ANSWER_TOKENS,
    MAX_CONTEXT_TOKENS,
    NUM_DEPTHS,
    Task,
    num_prompt_tokens,
    recall_tasks,
    talk_tasks,
    tool_tasks,
)
from moonshard.experiments.training.texts.tools.tool_library import PURPOSES

LENGTHS = (512, 2048, 4000)
CALL_TASKS = tool_tasks(3, 120)


def asked_line(task: Task) -> tuple[str, float]:
    """The line that holds the answer: its text and where it begins in the document, from 0 to 1."""
    answer = re.fullmatch(r"The (.+) of (.+) is (.+)\.", task.answer, re.DOTALL)
    assert answer is not None
    label, key, value = answer.groups()
    lines = document_lines(task)
    found = [
        (line, number / len(lines))
        for number, line in enumerate(lines)
        if re.search(rf"(^|\W){re.escape(key)}\W", line) and re.search(rf"\W{re.escape(value)}(\W|$)", line)
    ]
    assert len(found) == 1, (label, key, value, found)
    return found[0][0], found[0][1]


def document_lines(task: Task) -> list[str]:
    text = task.messages[0]["content"].split("\n\n")
    body = text[1] if len(task.messages) == 1 else "\n".join(text[1:])
    return body.splitlines()


def test_the_same_seed_asks_the_same_and_another_seed_something_else():
    text = pocket_text()
    for make in (
        lambda seed: recall_tasks(text, seed, 512, 10),
        lambda seed: tool_tasks(seed, 8),
        lambda seed: talk_tasks(seed, 8),
    ):
        assert make(0) == make(0)
        assert make(0) != make(1)


def test_more_questions_begin_with_the_fewer():
    text = pocket_text()
    assert recall_tasks(text, 0, 512, 20)[:12] == recall_tasks(text, 0, 512, 10)
    assert tool_tasks(0, 20)[:8] == tool_tasks(0, 8)[:8]


def test_no_line_of_a_training_document_but_its_title_is_held_out():
    def lines(split: str) -> set[str]:
        tasks = recall_tasks(pocket_text(), 0, 2048, 24 * NUM_DEPTHS, split)
        return {line for task in tasks for line in task.messages[0]["content"].splitlines()}

    assert len(lines(TRAIN)) > 5000
    assert lines(TRAIN) & lines(HELD_OUT) <= {"", *(domain.title for domain in DOMAINS)}


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_prompts_are_as_near_below_their_length_as_one_more_line_allows(num_tokens):
    text = pocket_text()
    tasks = recall_tasks(text, 1, num_tokens, 15)
    lengths = [num_prompt_tokens(text, task.messages) for task in tasks]
    for first in range(0, len(tasks), NUM_DEPTHS + 1):
        longest = max(lengths[first : first + NUM_DEPTHS + 1])
        assert num_tokens - 16 < longest <= num_tokens
    assert max(lengths) + MAX_ANSWER_TOKENS <= MAX_CONTEXT_TOKENS


def test_every_prompt_and_every_true_turn_fits_the_context():
    text = pocket_text()
    for task in [*CALL_TASKS, *talk_tasks(3, 40)]:
        num_prompt = num_prompt_tokens(text, task.messages, task.tools)
        said = [task.answer, *("".join(call.name + call.arguments_json() for call in r.calls) for r in task.rounds)]
        heard = [result for one in task.rounds for result in one.results]
        assert all(len(text.tokenizer.encode(turn)) + 24 <= MAX_ANSWER_TOKENS for turn in said)
        assert num_prompt + sum(len(text.tokenizer.encode(turn)) + 24 for turn in [*said, *heard]) < MAX_CONTEXT_TOKENS


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_questions_lie_one_in_each_fifth_of_the_document_that_answers_them(num_tokens):
    tasks = [task for task in recall_tasks(pocket_text(), 2, num_tokens, 15) if task.kind != "unknown"]
    assert Counter(task.depth for task in tasks) == dict.fromkeys(range(NUM_DEPTHS), 3)
    for task in tasks:
        assert task.kind == f"recall_{num_tokens}"
        assert task.depth is not None
        _, place = asked_line(task)
        assert task.depth <= place * NUM_DEPTHS + 1e-9
        assert place * NUM_DEPTHS < task.depth + 1


def test_questions_of_a_document_follow_each_other_and_share_it():
    tasks = recall_tasks(pocket_text(), 0, 512, 20)
    documents = [tuple(document_lines(task)) for task in tasks]
    for first in range(0, len(tasks), NUM_DEPTHS + 1):
        assert len(set(documents[first : first + NUM_DEPTHS + 1])) == 1
        assert tasks[first + NUM_DEPTHS].kind == "unknown"
    assert len(set(documents)) == 4


def test_documents_of_every_kind_take_turns_in_both_places():
    tasks = recall_tasks(pocket_text(), 0, 512, 24 * NUM_DEPTHS)[:: NUM_DEPTHS + 1]
    titles = [task.messages[0]["content"].split("\n")[0].split(":")[0] for task in tasks]
    assert titles == [domain.title for domain in DOMAINS] * 3
    assert Counter(task.messages[0]["role"] for task in tasks) == {"user": 16, "system": 8}


def test_a_document_ends_where_its_kind_has_no_more_keys():
    seed = next(seed for seed in range(100) if document(random_of(HELD_OUT, seed), HELD_OUT, 1).domain is DOMAINS[3])
    found = document(random_of(HELD_OUT, seed), HELD_OUT, 100_000)
    assert found.domain.title == "Inventory"
    assert len({fact.key for fact in found.facts}) == 880  # of 20 materials and 44 things
    with pytest.raises(ValueError, match="it has all keys of its kind"):
        unknown_fact(random_of(HELD_OUT, seed), found)


def test_questions_about_a_kind_with_few_keys_end_too():
    """The thirteenth of these once had no end."""
    tasks = recall_tasks(pocket_text(), 3, 4000, 13 * NUM_DEPTHS)
    assert len(tasks) == 13 * (NUM_DEPTHS + 1)
    assert tasks[-1].messages[0]["content"].startswith("Lost and found")


def test_no_fact_of_a_document_is_a_training_fact():
    """A key and all its values together belong to a split: those of its one line, or of two that name a label each."""
    for number, task in enumerate(recall_tasks(pocket_text(), 4, 512, 8 * NUM_DEPTHS)):
        if task.kind == "unknown":
            continue
        (label, key, value) = re.fullmatch(r"The (.+) of (.+) is (.+)\.", task.answer).groups()  # pyright: ignore
        own = [line.removeprefix(f"- {key}: ") for line in document_lines(task) if line.startswith(f"- {key}: ")]
        values = [line.split(" ", 1)[1] for line in own] if len(own) == 2 else [value]
        assert is_of(HELD_OUT, key, *values), (number, label, own)


def test_what_is_asked_as_unknown_is_not_in_the_document():
    tasks = [task for task in recall_tasks(pocket_text(), 0, 512, 100) if task.kind == "unknown"]
    assert len(tasks) == 20
    for task in tasks:
        question = task.messages[-1]["content"].rsplit("\n\n", 1)[-1]
        key = re.sub(r".*(?:the \w+ of )|^For |[.?]$|: which \w+\?$", "", question)
        assert not any(re.search(rf"(^|\W){re.escape(key)}\W", line) for line in document_lines(task)), question
        assert task.answer == UNKNOWN


def test_tool_questions_take_calls_and_a_quarter_as_many_take_none():
    assert Counter(bool(task.rounds) for task in CALL_TASKS) == {True: 120, False: 30}
    assert {task.kind for task in CALL_TASKS if task.rounds} == {task.kind for task in CALL_TASKS if not task.rounds}
    assert max(len(task.rounds) for task in CALL_TASKS) == 2
    assert max(len(part.calls) for task in CALL_TASKS for part in task.rounds) == 2


def test_every_expected_call_is_of_a_declared_function_with_its_parameters():
    for task in CALL_TASKS:
        declared = {tool["function"]["name"]: tool["function"]["parameters"] for tool in task.tools}
        for part in task.rounds:
            for call in part.calls:
                assert set(call.arguments) == set(declared[call.name]["required"])
                assert task.messages[-1]["role"] == "user"


def test_no_expected_call_is_a_training_call():
    calls = [(task, call) for task in CALL_TASKS for part in task.rounds for call in part.calls]
    assert len(calls) > 120
    for task, call in calls:
        if task.kind == "agents":
            assert_held_out_agent_call(call, task.messages[-1]["content"])
            continue
        purposes = [purpose.names[0] for purpose in PURPOSES if call.name in purpose.names]
        assert len(purposes) == 1
        assert is_of(HELD_OUT, purposes[0], *call.arguments.values())
        assert not is_of(TRAIN, purposes[0], *call.arguments.values())


def test_the_calls_that_are_asked_of_training_are_not_held_out():
    tasks = [task for task in tool_tasks(3, 120, TRAIN) if task.kind == "tools"]
    calls = [call for task in tasks for part in task.rounds for call in part.calls]
    assert len(calls) > 90
    for call in calls:
        (purpose,) = (purpose.names[0] for purpose in PURPOSES if call.name in purpose.names)
        assert not is_of(HELD_OUT, purpose, *call.arguments.values())


def assert_held_out_agent_call(call: Call, question: str) -> None:
    """Its path or what it searches for is of no training project; of a folder, that is never asked so in training."""
    first = str(next(iter(call.arguments.values())))
    forms = LISTINGS if call.name in TOOLS["list"][0] else RUNS if call.name in TOOLS["test"][0] else None
    if forms is None:
        assert is_of(HELD_OUT, first)
    else:
        assert question in {form.format(folder=first) for form in part_of(HELD_OUT, forms, first)}


def test_conversations_before_a_question_are_the_true_ones():
    """Every call made before has its result, and its id counts on."""
    ids = Counter()
    for task in CALL_TASKS:
        made = [call["id"] for message in task.messages for call in message.get("tool_calls", ())]
        answered = [message["tool_call_id"] for message in task.messages if message["role"] == "tool"]
        assert made == answered
        assert [int(each.rpartition(":")[2]) for each in made] == list(range(len(made)))
        ids[bool(made)] += 1
        for message in task.messages:
            for call in message.get("tool_calls", ()):
                json.loads(call["function"]["arguments"])
    assert min(ids[True], ids[False]) > 10


def test_a_longer_document_begins_with_the_shorter_one():
    """What the filling of a prompt relies on."""
    short, long = (document(random_of(HELD_OUT, 0, "x"), HELD_OUT, size) for size in (200, 400))
    assert long.lines[: len(short.lines)] == short.lines
