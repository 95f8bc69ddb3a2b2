"""What is asked and what comes back, whoever answers: the model in this process, or a server over HTTP.

A reply is what an OpenAI client sees: text, and calls that were taken out of it. Both answerers get their calls from
the same parser, so that their replies can be compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moonshard.experiments.common.turns import WrittenCall, assistant_message
from moonshard.experiments.training.texts.conversation import Message, Tool


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A conversation that waits for the assistant's next turn."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """One turn. A section of calls that is not valid stands in `content`, its markers spelt out."""

    content: str
    calls: tuple[WrittenCall, ...] = ()

    def message(self) -> Message:
        """The turn as the client sends it back."""
        return assistant_message(self.content, self.calls)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoReply:
    """The reason why there is no reply."""

    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Who answers. None for what a server does not tell."""

    model: str
    url: str | None = None
    fingerprint: str | None = None
    dtype: str | None = None


class Answerer(Protocol):
    """Answers turns, by greedy decoding."""

    @property
    def identity(self) -> Identity: ...

    def router_load(self) -> list[float] | None:
        """The busiest expert's tokens so far over the mean, for each layer with experts. None where it is not known."""
        ...

    def answer(self, asked: Sequence[Asked]) -> list[Reply | NoReply]:
        """One reply for each conversation, in order. They may run together."""
        ...
