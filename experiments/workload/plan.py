"""What a workload is: requests, and when each of them is sent.

A request is sent at a time of its own, whatever became of the others (open loop), or a pause after another one has
ended (closed loop, and the turns of a session). Prompts are made when they are asked for: a trace has more tokens than
fit in memory. Plain data; what sends it is the runner's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class WorkloadError(ValueError):
    """A workload that cannot be made; the message names the line, the option or the field."""


class Prompt(Protocol):
    """Token ids that need not exist yet."""

    def __len__(self) -> int: ...

    def tokens(self) -> list[int]:
        """The prompt's ids: the same each time."""
        ...


@dataclass(frozen=True, slots=True)
class Tokens:
    """A prompt whose token ids exist already."""

    ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def tokens(self) -> list[int]:
        return list(self.ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One request: either `at_s` is set or `after` is."""

    prompt: Prompt
    max_tokens: int
    at_s: float | None = None  # from the beginning of the run
    after: int | None = None  # the number, in the workload, of the request that has to end before
    pause_s: float = 0.0  # between the two
    session: str | None = None
    turn: int = 0  # of its session


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests in an order in which each comes after the one that it waits for.

    `num_clipped` prompts were cut to the context that there is.
    """

    requests: Sequence[Planned]
    num_clipped: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def is_open(self) -> bool:
        """Whether every request has a time of its own."""
        return all(request.at_s is not None for request in self.requests)


def check(requests: Sequence[Planned]) -> None:
    """WorkloadError for a request without a time or with two, or one that waits for a later one."""
    for number, request in enumerate(requests):
        if (request.at_s is None) == (request.after is None):
            raise WorkloadError(f"request {number}: exactly one of at_s and after is needed")
        if request.at_s is not None and request.at_s < 0:
            raise WorkloadError(f"request {number}: at_s is {request.at_s:g}")
        if request.after is not None and not 0 <= request.after < number:
            raise WorkloadError(f"request {number}: after is {request.after}, which does not come before it")
        if not len(request.prompt) or request.max_tokens < 1:
            raise WorkloadError(f"request {number}: an empty prompt, or no token asked for")
