"""From outcomes to the figures of the rows, their intervals, and what stands beside them.

A row that nothing was asked for has no figure: None, not 0.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from moonshard.experiments.evaluation.interview import InterviewOutcome
from moonshard.experiments.training.texts.tools.tasks import NUM_DEPTHS

RECALL_TOKENS = {"recall_512": 512, "recall_2048": 2048, "recall_4000": 4000}
TOOL_ROWS = ("tool_json", "tool_call", "tool_answer")
CLIENT_ROWS = ("client_call", "client_answer")
ROWS = (*RECALL_TOKENS, *TOOL_ROWS, *CLIENT_ROWS)
TOOL_KINDS = ("tools", "agents")
Z_95 = 1.959964  # of the normal distribution, two-sided
MAX_ERRORS = 5  # shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    num_right: int
    num: int

    @property
    def value(self) -> float | None:
        return self.num_right / self.num if self.num else None

    def interval(self) -> tuple[float, float]:
        """Wilson's, at 95 %; all of [0, 1] without any question. Wilson 1927, equation 4 in Brown et al. 2001."""
        if not self.num:
            return 0.0, 1.0
        share, spread = self.num_right / self.num, Z_95**2 / self.num
        middle = (share + spread / 2) / (1 + spread)
        half = Z_95 / (1 + spread) * sqrt(share * (1 - share) / self.num + spread / (4 * self.num))
        return max(0.0, middle - half), min(1.0, middle + half)


def row_shares(outcomes: Sequence[InterviewOutcome]) -> dict[str, Share]:
    """Each row's share, by its name.

    tool_json: of the turns in which calls were due or tried, those whose every call is complete; a turn without the
    call that was due is none. The other two are of the questions that take calls. tool_call: those with the right
    function and arguments in every turn. tool_answer: those with the right answer in the end. The rows of clients are
    the same of conversations in the manner of some client.
    """
    by_kind: dict[str, list[InterviewOutcome]] = defaultdict(list)
    for outcome in outcomes:
        by_kind[outcome.task.kind].append(outcome)
    with_tools = [outcome for kind in TOOL_KINDS for outcome in by_kind[kind]]
    calling = [outcome for outcome in with_tools if outcome.task.rounds]
    return {
        **{row: answered(by_kind[row]) for row in RECALL_TOKENS},
        "tool_json": Share(
            num_right=sum(outcome.num_whole_call_turns for outcome in with_tools),
            num=sum(outcome.num_call_turns for outcome in with_tools),
        ),
        "tool_call": called(calling),
        "tool_answer": answered(calling),
        "client_call": called(by_kind["clients"]),
        "client_answer": answered(by_kind["clients"]),
    }


def called(outcomes: Sequence[InterviewOutcome]) -> Share:
    return Share(num_right=sum(outcome.has_right_calls for outcome in outcomes), num=len(outcomes))


def answered(outcomes: Sequence[InterviewOutcome]) -> Share:
    return Share(num_right=sum(outcome.has_right_answer for outcome in outcomes), num=len(outcomes))


def side_shares(outcomes: Sequence[InterviewOutcome]) -> dict[str, Share]:
    """Right answers where they are no row of their own, and how the tool questions divide.

    no_tool_call: of the questions that declare tools and take no call, those in which none was made or tried. It stands
    apart from tool_call, which who calls nothing must not gain by.
    """
    calling_none = [outcome for outcome in outcomes if outcome.task.kind in TOOL_KINDS and not outcome.task.rounds]
    kinds = {
        "unknown": [outcome for outcome in outcomes if outcome.task.kind == "unknown"],
        "talk": [outcome for outcome in outcomes if outcome.task.kind == "talk"],
        **{f"{kind}_answer": [outcome for outcome in outcomes if outcome.task.kind == kind] for kind in TOOL_KINDS},
        "no_tool_answer": calling_none,
        "two_round_answer": [outcome for outcome in outcomes if len(outcome.task.rounds) > 1],
    }
    shares = {"no_tool_call": called(calling_none)} | {name: answered(some) for name, some in kinds.items()}
    return {name: share for name, share in shares.items() if share.num}


def depth_shares(outcomes: Sequence[InterviewOutcome]) -> dict[str, list[float | None]]:
    """The share of each recall row by where the fact stands: the document's first fifth, its second, ..."""
    return {
        row: [
            answered([o for o in outcomes if o.task.kind == row and o.task.depth == depth]).value
            for depth in range(NUM_DEPTHS)
        ]
        for row in RECALL_TOKENS
        if any(outcome.task.kind == row for outcome in outcomes)
    }


def errors(outcomes: Sequence[InterviewOutcome]) -> tuple[int, list[str]]:
    """How many tasks got no reply, and the commonest reasons."""
    found = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    return found.total(), [f"{number} x {text}" for text, number in found.most_common(MAX_ERRORS)]
