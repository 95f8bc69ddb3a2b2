"""Asks tasks and grades them: turn by turn, a wrong call ending the task.

Many tasks are asked together, since that is how an answerer is fast. Results are sent back for the calls as the
assistant wrote them, not for the true ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from moonshard.experiments.evaluation.grading import (
    attempts_calls,
    has_whole_calls,
    is_answer,
    results_of,
    tool_messages,
)
from moonshard.experiments.evaluation.replies import Answerer, Asked, NoReply, Reply
from moonshard.experiments.training.texts.conversation import Message
from moonshard.experiments.training.texts.tools.tasks import Task

TOGETHER = 48  # tasks: whole documents with all their questions


@dataclass(frozen=True, kw_only=True, slots=True)
class InterviewOutcome:
    """How a task went. `error` is set where a turn got no reply: then nothing in it counts as right."""

    task: Task
    replies: tuple[Reply, ...]
    has_right_calls: bool  # in every turn; where none is due, none was made
    has_right_answer: bool  # after right calls
    num_call_turns: int  # turns in which calls were due or were tried
    num_whole_call_turns: int  # of these, the ones whose every call is complete
    error: str | None = None


@dataclass(slots=True)
class _Asking:
    """A task that is being asked."""

    task: Task
    messages: list[Message]
    replies: list[Reply] = field(default_factory=list)
    num_call_turns: int = 0
    num_whole_call_turns: int = 0
    outcome: InterviewOutcome | None = None

    def take(self, reply: Reply | NoReply) -> None:
        """Takes the next reply: either another turn is due, or the task ends with an outcome."""
        due = self.task.rounds[len(self.replies) :]
        if isinstance(reply, NoReply):
            self.num_call_turns += bool(due)
            return self._end(error=reply.error)
        self.replies.append(reply)
        is_call_turn = bool(due) or attempts_calls(reply)
        self.num_call_turns += is_call_turn
        self.num_whole_call_turns += is_call_turn and has_whole_calls(reply)
        if not due:
            is_right = not attempts_calls(reply)
            return self._end(calls=is_right, answer=is_right and is_answer(reply, self.task.answer))
        results = results_of(reply, due[0])
        if results is None:
            return self._end()
        self.messages += [reply.message(), *tool_messages(reply, results)]

    def _end(self, *, calls: bool = False, answer: bool = False, error: str | None = None) -> None:
        self.outcome = InterviewOutcome(
            task=self.task,
            replies=tuple(self.replies),
            has_right_calls=calls,
            has_right_answer=answer,
            num_call_turns=self.num_call_turns,
            num_whole_call_turns=self.num_whole_call_turns,
            error=error,
        )


def interview(answerer: Answerer, tasks: Sequence[Task], *, together: int = TOGETHER) -> Iterator[InterviewOutcome]:
    """Yields the outcome of each task, in order, some at a time, so that an interrupted caller has those."""
    for first in range(0, len(tasks), together):
        some = [_Asking(task=task, messages=list(task.messages)) for task in tasks[first : first + together]]
        while pending := [each for each in some if each.outcome is None]:
            asked = [Asked(messages=tuple(each.messages), tools=each.task.tools) for each in pending]
            for each, reply in zip(pending, answerer.answer(asked), strict=True):
                each.take(reply)
        yield from (each.outcome for each in some if each.outcome is not None)
