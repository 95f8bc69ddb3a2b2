"""How long a conversation will be once rendered, without a tokenizer: the generators stop by it. An estimate."""

import json
from collections.abc import Sequence

from moonshard.experiments.training.texts.conversation import Exchange, Tool

CHARS_PER_TOKEN = 3.0
JSON_CHARS_PER_TOKEN = 4.0  # the same names and marks over and over
MESSAGE_TOKENS = 4  # role and end marks
CALL_TOKENS = 10  # marks and id of a call, heading of its result


def tokens_of(text: str) -> int:
    return int(len(text) / CHARS_PER_TOKEN) + MESSAGE_TOKENS


def opening_tokens(system: str | None, tools: Sequence[Tool]) -> int:
    """Tokens before the first question."""
    declared = int(len(json.dumps(tools)) / JSON_CHARS_PER_TOKEN) + MESSAGE_TOKENS if tools else 0
    return declared + (0 if system is None else tokens_of(system))


def exchange_tokens(exchange: Exchange) -> int:
    found = tokens_of(exchange.question) + tokens_of(exchange.answer)
    for part in exchange.rounds:
        found += MESSAGE_TOKENS
        for call, result in zip(part.calls, part.results, strict=True):
            found += CALL_TOKENS + tokens_of(call.name + call.arguments_json()) + tokens_of(result)
    return found
