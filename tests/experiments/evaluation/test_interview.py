"""A task is asked turn by turn, a wrong call ends it, and no question is lost or counted twice."""

from collections.abc import Callable, Sequence

import pytest

from moonshard.experiments.common.turns import WrittenCall
from moonshard.experiments.evaluation.figures import Share, errors, row_shares, side_shares
from moonshard.experiments.evaluation.interview import InterviewOutcome, interview
from moonshard.experiments.evaluation.replies import Asked, Identity, NoReply, Reply
from moonshard.experiments.training.texts.conversation import CallRound
from moonshard.experiments.training.texts.corpus import pocket_text
from moonshard.experiments.training.texts.tools.tasks import Task, recall_tasks, talk_tasks, tool_tasks

TASKS = (*tool_tasks(0, 24), *talk_tasks(0, 6), *recall_tasks(pocket_text(), 0, 512, 10))
Turn = Callable[[Task, int], Reply | NoReply]


class Scripted:
    """Answers by a rule, given the task and the number of the turn."""

    identity = Identity(model="scripted")

    def __init__(self, turn: Turn):
        self._turn = turn
        self.asked: list[Asked] = []

    def router_load(self) -> None:
        return None

    def answer(self, asked: Sequence[Asked]) -> list[Reply | NoReply]:
        self.asked += asked
        return [self._turn(*_place(each)) for each in asked]


def _place(asked: Asked) -> tuple[Task, int]:
    task = next(task for task in TASKS if asked.messages[: len(task.messages)] == task.messages)
    return task, sum(message["role"] == "assistant" for message in asked.messages[len(task.messages) :])


def true_calls(part: CallRound) -> tuple[WrittenCall, ...]:
    return tuple(
        WrittenCall(id=f"call {index}", name=call.name, arguments=call.arguments_json())
        for index, call in enumerate(part.calls)
    )


def perfect(task: Task, turn: int) -> Reply:
    if turn < len(task.rounds):
        return Reply(content="", calls=true_calls(task.rounds[turn]))
    return Reply(content=task.answer)


def ask(turn: Turn) -> tuple[list[InterviewOutcome], Scripted]:
    scripted = Scripted(turn)
    return list(interview(scripted, TASKS, together=7)), scripted


def figures(turn: Turn) -> dict[str, float | None]:
    """The rows and what stands beside them."""
    outcomes, _ = ask(turn)
    return {name: share.value for name, share in (row_shares(outcomes) | side_shares(outcomes)).items()}


def test_who_knows_everything_gets_everything_right():
    outcomes, scripted = ask(perfect)
    assert [outcome.task for outcome in outcomes] == list(TASKS)
    assert all(outcome.has_right_calls and outcome.has_right_answer for outcome in outcomes)
    assert len(scripted.asked) == sum(1 + len(task.rounds) for task in TASKS)
    shares = row_shares(outcomes)
    num_rounds = sum(len(task.rounds) for task in TASKS)
    assert shares["tool_json"] == Share(num_right=num_rounds, num=num_rounds)
    assert (shares["tool_call"].num, shares["tool_answer"].num, shares["recall_512"].num) == (24, 24, 10)
    assert shares["recall_4000"].value is None
    assert side_shares(outcomes)["no_tool_call"] == Share(num_right=6, num=6)


def test_results_go_back_for_the_calls_as_they_were_written():
    _, scripted = ask(perfect)
    second_turns = [each for each in scripted.asked if each.messages[-1]["role"] == "tool"]
    assert len(second_turns) >= 24
    for asked in second_turns:
        task, turn = _place(asked)
        part = task.rounds[turn - 1]
        *_, said = (message for message in asked.messages if message["role"] == "assistant")
        assert [call["function"]["name"] for call in said["tool_calls"]] == [call.name for call in part.calls]
        results = asked.messages[-len(part.results) :]
        assert [message["content"] for message in results] == list(part.results)
        assert [message["tool_call_id"] for message in results] == [call["id"] for call in said["tool_calls"]]


def test_who_never_calls_fails_all_but_the_questions_that_take_no_call():
    found = figures(lambda task, turn: Reply(content=task.answer))
    assert (found["tool_json"], found["tool_call"], found["no_tool_call"]) == (0, 0, 1)
    assert found["tool_answer"] == 0  # right words, but nobody asked the tool
    assert found["recall_512"] == 1


def test_who_always_calls_fails_the_questions_that_take_no_call():
    any_call = WrittenCall(id="x", name="nothing", arguments="{}")
    found = figures(lambda task, turn: perfect(task, turn) if task.rounds else Reply(content="", calls=(any_call,)))
    assert (found["tool_json"], found["tool_call"], found["tool_answer"]) == (1, 1, 1)
    assert (found["no_tool_call"], found["no_tool_answer"]) == (0, 0)


def test_a_call_that_is_only_tried_is_a_call_where_none_is_due():
    def trying(task: Task, turn: int) -> Reply:
        return perfect(task, turn) if task.rounds else Reply(content=task.answer + "<|tool_call_begin|>")

    found = figures(trying)
    assert (found["tool_call"], found["no_tool_call"]) == (1, 0)


def test_one_call_too_many_at_the_end_is_a_wrong_call_and_a_wrong_answer():
    def restless(task: Task, turn: int) -> Reply:
        if turn == len(task.rounds):
            return Reply(content="", calls=(WrittenCall(id="x", name="nothing", arguments="{}"),))
        return perfect(task, turn)

    found = figures(restless)
    assert (found["tool_json"], found["tool_call"], found["tool_answer"], found["recall_512"]) == (1, 0, 0, 0)


def test_a_wrong_call_ends_the_task():
    wrong = WrittenCall(id="x", name="nothing", arguments="{")
    outcomes, scripted = ask(lambda task, turn: Reply(content="", calls=(wrong,)) if task.rounds else perfect(task, 0))
    assert len(scripted.asked) == len(TASKS)
    shares = row_shares(outcomes)
    assert shares["tool_json"] == Share(num_right=0, num=24)
    assert shares["tool_answer"] == Share(num_right=0, num=24)
    assert shares["tool_call"] == Share(num_right=0, num=24)


def test_a_wrong_final_answer_spoils_the_answer_and_not_the_call():
    def mumble(task: Task, turn: int) -> Reply:
        return perfect(task, turn) if turn < len(task.rounds) else Reply(content="Hm.")

    found = figures(mumble)
    assert (found["tool_json"], found["tool_call"], found["tool_answer"], found["recall_512"]) == (1, 1, 0, 0)
    assert (found["no_tool_call"], found["no_tool_answer"]) == (1, 0)


@pytest.mark.parametrize("at_turn", [0, 1])
def test_a_turn_without_reply_counts_as_wrong_and_is_told(at_turn):
    def failing(task: Task, turn: int) -> Reply | NoReply:
        return NoReply(error="HTTP 500: oh") if task.rounds and turn == at_turn else perfect(task, turn)

    outcomes, _ = ask(failing)
    shares = row_shares(outcomes)
    assert len(outcomes) == len(TASKS)
    assert shares["tool_answer"] == Share(num_right=0, num=24)
    assert shares["tool_call"] == Share(num_right=0, num=24)
    num_due = 24 + at_turn * sum(len(task.rounds) == 2 for task in TASKS)
    assert shares["tool_json"].num == num_due
    assert shares["tool_json"].num_right == (24 if at_turn else 0)
    assert errors(outcomes) == (24, ["24 x HTTP 500: oh"])


def test_wilsons_interval_is_the_textbooks_and_never_empty():
    low, high = Share(num_right=95, num=100).interval()
    assert (round(low, 4), round(high, 4)) == (0.8882, 0.9785)
    assert Share(num_right=0, num=0).interval() == (0.0, 1.0)
    low, high = Share(num_right=200, num=200).interval()
    assert (round(low, 4), round(high, 9)) == (0.9812, 1.0)
