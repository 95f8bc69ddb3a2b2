"""What the generators make and everything else reads: conversations whose every answer is known.

A conversation is a run of exchanges. In an exchange the user asks, the assistant may call tools, once or in several
rounds, and then answers. Training renders all of it; an evaluation asks one exchange, after the true ones before it,
and compares. Which split a piece of content belongs to is decided here, by its hash. A fact (a key with all its
values), the arguments of a call, a path or a name in an agent's project, a text to copy, and a phrasing of small talk
each belong to one. All other questions are worded alike in both, and a single value of a fact with several labels may
occur in both; what is asked in evaluation must still be read from the text.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

Message = dict[str, Any]  # as in OpenAI's chat completions
Tool = dict[str, Any]  # likewise: {"type": "function", "function": {...}}

TRAIN, HELD_OUT = "train", "held-out"
HELD_OUT_SHARE = 8  # one in so many pieces of content is held out


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A function and its arguments, as the assistant writes them."""

    name: str
    arguments: Mapping[str, object]

    def arguments_json(self) -> str:
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallRound:
    """Calls made in one turn, and what each of them returned."""

    calls: tuple[Call, ...]
    results: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    question: str
    answer: str
    rounds: tuple[CallRound, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    exchanges: tuple[Exchange, ...]
    system: str | None = None
    tools: tuple[Tool, ...] = ()

    def messages(self) -> list[Message]:
        """The whole conversation, ids of calls counted over all of it as Kimi does."""
        found: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        num_calls = 0
        for exchange in self.exchanges:
            found.append({"role": "user", "content": exchange.question})
            for part in exchange.rounds:
                found += round_messages(part, num_calls)
                num_calls += len(part.calls)
            found.append({"role": "assistant", "content": exchange.answer})
        return found


def round_messages(part: CallRound, first_index: int) -> list[Message]:
    """The assistant's turn with its calls, then a message per result."""
    ids = [f"functions.{call.name}:{first_index + index}" for index, call in enumerate(part.calls)]
    calls = [
        {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json()}}
        for call_id, call in zip(ids, part.calls, strict=True)
    ]
    results = [
        {"role": "tool", "tool_call_id": call_id, "content": result}
        for call_id, result in zip(ids, part.results, strict=True)
    ]
    return [{"role": "assistant", "content": None, "tool_calls": calls}, *results]


def random_of(split: str, seed: int, *place: object) -> Random:
    """The one source of randomness: by split, seed and place (a skill, a step, a row)."""
    return Random("/".join(str(part) for part in (split, seed, *place)))


def is_of(split: str, *content: object) -> bool:
    """Whether a piece of content (a fact, a call's arguments, a path, a question) belongs to the split."""
    return (_hash(*content) % HELD_OUT_SHARE == 0) == (split == HELD_OUT)


def part_of[Item](split: str, items: Sequence[Item], *context: object) -> list[Item]:
    """The items that belong to the split in this context; of two or more, each split gets some."""
    ranked = sorted(items, key=lambda item: _hash(*context, item))
    num_held_out = max(1, len(items) // HELD_OUT_SHARE)
    return ranked[:num_held_out] if split == HELD_OUT else ranked[num_held_out:]


def pick[Item](random: Random, split: str, items: Sequence[Item], *context: object) -> Item:
    """One of the items that belong to the split in this context. IndexError for a single item in training."""
    return random.choice(part_of(split, items, *context))


def _hash(*content: object) -> int:
    text = "/".join(str(part) for part in content)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest())
