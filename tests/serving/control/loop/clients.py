"""Requests as their clients see them: what each must be told, what it was told, and how it ended."""

from dataclasses import dataclass, field

from moonshard.serving.control.batching.queue import Rejected
from moonshard.serving.control.dispatch.dispatcher import NoRoom, NoWorker
from moonshard.serving.control.dispatch.retries import Failure, Retries
from moonshard.serving.control.request import FinishReason, Request
from moonshard.serving.control.ttft.bound import TooLate


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The request's last possible attempt failed."""

    failure: Failure


class Cancelled:
    """The client left."""


type Refusal = NoWorker | NoRoom | TooLate | Rejected | GivenUp
type Ended = FinishReason | Refusal | Cancelled


@dataclass(eq=False, kw_only=True, slots=True)
class Asked:
    number: int
    request: Request
    affinity_key: bytes | None
    right: tuple[tuple[list[int], FinishReason], ...]  # what each choice must come to
    retries: Retries
    tokens: tuple[list[int], ...]
    finish: dict[int, FinishReason] = field(default_factory=dict)
    ended: Ended | None = None

    def take(self, choice: int, token: int, finish: FinishReason | None) -> None:
        """The next token of a choice."""
        assert self.ended is None, "a token after the end"
        assert choice not in self.finish, "a token after the last one"
        right, reason = self.right[choice]
        tokens = self.tokens[choice]
        assert token == right[len(tokens)], "a token that is another's"
        tokens.append(token)
        assert finish == (reason if len(tokens) == len(right) else None)
        if finish is not None:
            self.finish[choice] = finish

    @property
    def is_complete(self) -> bool:
        return len(self.finish) == self.request.n

    def end(self, ended: Ended) -> None:
        assert self.ended is None, "ended twice"
        assert self.is_complete or not isinstance(ended, FinishReason)
        self.ended = ended

    @property
    def kind(self) -> str:
        """How it ended."""
        assert self.ended is not None, "not ended"
        return "Finished" if isinstance(self.ended, FinishReason) else type(self.ended).__name__
