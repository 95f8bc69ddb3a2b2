"""Real prompts out of a file of JSON lines: token ids, texts or chats, and when each is sent.

The file is read before a server is there, with all that can be wrong in it; texts and chats become tokens by the
tokenizer and the template of the model that is served.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from moonshard.experiments.workload.plan import Planned, Tokens, Workload, WorkloadError, check
from moonshard.rpc.status import RequestError
from moonshard.rpc.types import Prompt

KEYS = ("prompt", "messages", "max_tokens", "at_s")  # of a line
Tokenize = Callable[[Prompt], Sequence[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLine:
    """One line of the file. Without `at_s` its request is sent after the one before."""

    number: int
    prompt: Prompt
    max_tokens: int
    at_s: float | None

    @property
    def token_ids(self) -> list[int] | None:
        """The prompt's ids; None where it is text, which only a model's tokenizer can count."""
        return list(self.prompt) if _is_ids(self.prompt) else None


def read_prompts(path: Path) -> list[PromptLine]:
    """One JSON object a line: `prompt` (text or token ids) or `messages`, `max_tokens`, and `at_s` or none.

    Raises:
        WorkloadError: naming the line and what is wrong with it, also where its time is before that of one above it;
        OSError for a file that cannot be read.
    """
    found: list[PromptLine] = []
    latest_s = 0.0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                found.append(_line(number, json.loads(line)))
                if (at_s := found[-1].at_s) is not None:
                    if at_s < latest_s:
                        raise ValueError(f"at_s {at_s:g} after a later one")
                    latest_s = at_s
            except (ValueError, RecursionError) as error:
                raise WorkloadError(f"{path}, line {number}: {error}") from error
    return found


def from_prompts(
    lines: Sequence[PromptLine],
    *,
    vocab_size: int,
    max_context_tokens: int,
    tokenize: Tokenize | None = None,
    clips: bool = False,
) -> Workload:
    """Requests from lines; those without a time are sent one after another.

    Raises:
        WorkloadError: naming the line: ids that the model has not, words that cannot be told in its tokens (also where
        there is no `tokenize`), or more than its context, unless it `clips` prompts to it, which is counted.
    """
    found: list[Planned] = []
    num_clipped = 0
    for line in lines:
        ids = line.token_ids
        if ids is None:
            ids = _tokenized(line, tokenize)
        elif max(ids) >= vocab_size:
            raise WorkloadError(f"line {line.number}: id {max(ids)} of a model that has {vocab_size}")
        room = max_context_tokens - line.max_tokens
        if len(ids) > room:
            if not clips or room < 1:
                both = f"{len(ids)} + {line.max_tokens} tokens"
                raise WorkloadError(f"line {line.number}: {both} are more than a context of {max_context_tokens}")
            ids = ids[:room]
            num_clipped += 1
        planned = Planned(prompt=Tokens(tuple(ids)), max_tokens=line.max_tokens, at_s=line.at_s)
        if line.at_s is None:
            planned = replace(planned, after=len(found) - 1) if found else replace(planned, at_s=0.0)
        found.append(planned)
    check(found)
    return Workload(requests=found, num_clipped=num_clipped)


def _tokenized(line: PromptLine, tokenize: Tokenize | None) -> list[int]:
    if tokenize is None:
        raise WorkloadError(f"line {line.number}: words, and no server to tell them in tokens")
    try:
        ids = list(tokenize(line.prompt))
    except RequestError as error:
        raise WorkloadError(f"line {line.number}: {error}") from error
    if not ids:
        raise WorkloadError(f"line {line.number}: no token of it is left")
    return ids


def _line(number: int, raw: Any) -> PromptLine:
    if not isinstance(raw, dict):
        raise ValueError("expected an object")
    if unknown := sorted(raw.keys() - set(KEYS)):
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(KEYS)}")
    if ("prompt" in raw) == ("messages" in raw):
        raise ValueError("exactly one of prompt and messages is needed")
    max_tokens, at_s = raw.get("max_tokens"), raw.get("at_s")
    if not _is_count(max_tokens) or max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens!r}")
    if at_s is not None and (not isinstance(at_s, int | float) or isinstance(at_s, bool) or not 0 <= at_s < 1e9):
        raise ValueError(f"at_s is {at_s!r}, not a number of seconds")
    prompt = _chat(raw["messages"]) if "messages" in raw else _prompt(raw["prompt"])
    return PromptLine(number=number, prompt=prompt, max_tokens=max_tokens, at_s=None if at_s is None else float(at_s))


def _prompt(raw: object) -> Prompt:
    if isinstance(raw, str) and raw:
        return raw
    if not _is_ids(raw):
        raise ValueError("prompt is neither a text nor a list of token ids")
    return raw


def _chat(raw: object) -> Prompt:
    if not isinstance(raw, list) or not raw or not all(_is_message(one) for one in raw):
        raise ValueError("messages is not a list of objects with role and content")
    return raw


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"role", "content"}
        and all(isinstance(text, str) for text in value.values())
    )


def _is_ids(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(_is_count(token) for token in value)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
