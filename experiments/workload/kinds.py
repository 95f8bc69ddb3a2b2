"""The workloads there are: a trace, fixed lengths, agents' sessions, and prompts out of a file.

Each is a function of its options and a seed. Lengths count tokens of the served model, which says how many ids it has.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from typing import TypeGuard

from moonshard.experiments.trace_file import BLOCK_TOKENS, TracedRequest, TraceError
from moonshard.experiments.workload.arrivals import gamma
from moonshard.experiments.workload.blocks import BlockPrompt
from moonshard.experiments.workload.plan import Planned, Prompt, Tokens, Workload, WorkloadError, check

BIN_S = 3.0  # Mooncake's traces tell the time in steps of so many seconds


def from_trace(
    traced: Sequence[TracedRequest],
    *,
    vocab_size: int,
    max_context_tokens: int,
    time_scale: float = 1.0,
    length_scale: float = 1.0,
    clips: bool = False,
    seed: int = 0,
) -> Workload:
    """Each request somewhere in the bin of its stamp, so that not all of a bin come at once.

    Args:
        traced: in the order of their time.
        time_scale: 0.5 sends twice as many requests a second.
        length_scale: of prompts and completions; blocks shrink with them, so that the same prompts begin alike.
        clips: cut what does not fit into the context, and count it; else it is refused.

    Raises:
        WorkloadError: stamps that go back, or a request that does not fit.
    """
    for option, value in (("time_scale", time_scale), ("length_scale", length_scale)):
        if not value > 0:
            raise WorkloadError(f"{option} is {value:g}")
    for number, (before, after) in enumerate(pairwise(traced), start=2):
        if after.timestamp_ms < before.timestamp_ms:
            raise WorkloadError(f"request {number}: its timestamp is less than that of the one before")
    random, block_tokens = Random(seed), max(1, round(BLOCK_TOKENS * length_scale))
    found: list[Planned] = []
    num_clipped = 0
    for number, one in enumerate(traced, start=1):
        num_prompt = max(1, round(one.input_tokens * length_scale))
        max_tokens = max(1, round(one.output_tokens * length_scale))
        if num_prompt + max_tokens > max_context_tokens:
            if not clips:
                both = f"{num_prompt} + {max_tokens} tokens"
                raise WorkloadError(f"request {number}: {both} are more than a context of {max_context_tokens}")
            num_clipped += 1
            max_tokens = min(max_tokens, max_context_tokens - 1)
            num_prompt = min(num_prompt, max_context_tokens - max_tokens)
        num_blocks = -(-num_prompt // block_tokens)
        prompt = BlockPrompt(
            blocks=_padded(one.blocks, num_blocks)[:num_blocks],
            num_tokens=num_prompt,
            block_tokens=block_tokens,
            vocab_size=vocab_size,
            seed=seed,
        )
        at_s = time_scale * (one.timestamp_ms / 1e3 + random.random() * BIN_S)
        found.append(Planned(prompt=prompt, max_tokens=max_tokens, at_s=at_s))
    return Workload(requests=sorted(found, key=lambda request: request.at_s or 0.0), num_clipped=num_clipped)


def _padded(blocks: tuple[int, ...], num_blocks: int) -> tuple[int, ...]:
    """Rounding may need a block more than the trace names: the last one again, which only its own prompt has."""
    return blocks + blocks[-1:] * (num_blocks - len(blocks))


def fixed(
    *,
    num_prompt: int,
    num_output: int,
    num_requests: int,
    vocab_size: int,
    rate_per_s: float | None = None,
    variation: float = 1.0,
    num_clients: int = 1,
    seed: int = 0,
) -> Workload:
    """Fresh prompts of one length: summarising, generating, and what lies between.

    Open loop with a rate, else as many clients one request after another.
    """
    if num_prompt < 1 or num_output < 1 or num_requests < 1 or num_clients < 1:
        raise WorkloadError("num_prompt, num_output, num_requests and num_clients begin at 1")
    block = iter(range(num_requests))
    prompts = (
        BlockPrompt(
            blocks=(next(block),), num_tokens=num_prompt, block_tokens=num_prompt, vocab_size=vocab_size, seed=seed
        )
        for _ in range(num_requests)
    )
    if rate_per_s is None:
        return closed(prompts, num_output, num_clients)
    times = islice(gamma(rate_per_s, variation, Random(seed)), num_requests)
    return Workload(
        requests=[Planned(prompt=p, max_tokens=num_output, at_s=at_s) for p, at_s in zip(prompts, times, strict=True)]
    )


def closed(prompts: Iterable[Prompt], max_tokens: int, num_clients: int) -> Workload:
    """Each client sends its next request when its last one has ended."""
    requests = [
        Planned(prompt=prompt, max_tokens=max_tokens, at_s=0.0)
        if place < num_clients
        else Planned(prompt=prompt, max_tokens=max_tokens, after=place - num_clients)
        for place, prompt in enumerate(prompts)
    ]
    return Workload(requests=requests)


def sessions(
    prompts: Sequence[Sequence[Sequence[int]]],
    *,
    max_tokens: int,
    num_clients: int,
    mean_think_s: float,
    seed: int = 0,
) -> Workload:
    """Sessions, each the prompts of its turns: a turn is sent after the one before and some thought.

    A client begins its next session when its last one is over.
    """
    if not mean_think_s >= 0 or num_clients < 1:
        raise WorkloadError("mean_think_s begins at 0, num_clients at 1")
    random = Random(seed)
    requests: list[Planned] = []
    last_of: dict[int, int] = {}  # the place of each client's last request
    for number, turns in enumerate(prompts):
        client = number % num_clients
        for turn, prompt in enumerate(turns):
            pause_s = random.expovariate(1 / mean_think_s) if mean_think_s and client in last_of else 0.0
            planned = Planned(
                prompt=Tokens(tuple(prompt)), max_tokens=max_tokens, session=f"session {number}", turn=turn, at_s=0.0
            )
            if client in last_of:
                planned = replace(planned, at_s=None, after=last_of[client], pause_s=pause_s)
            last_of[client] = len(requests)
            requests.append(planned)
    check(requests)
    return Workload(requests=requests)


def from_prompts(path: Path, *, max_context_tokens: int, clips: bool = False) -> Workload:
    """A file of real prompts: one JSON object a line, with `prompt` (token ids) and `max_tokens`, and `at_s` or none.

    Lines without a time come one after another.

    Raises:
        WorkloadError: naming the line and what is wrong with it; OSError for a file that cannot be read.
    """
    found: list[Planned] = []
    num_clipped = 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                planned = _planned(json.loads(line), len(found))
            except (ValueError, RecursionError) as error:
                raise WorkloadError(f"{path}, line {number}: {error}") from error
            room = max_context_tokens - planned.max_tokens
            if len(planned.prompt) > room:
                if not clips or room < 1:
                    raise WorkloadError(f"{path}, line {number}: more than a context of {max_context_tokens} tokens")
                planned = replace(planned, prompt=Tokens(tuple(planned.prompt.tokens()[:room])))
                num_clipped += 1
            found.append(planned)
    check(found)
    return Workload(requests=found, num_clipped=num_clipped)


def _planned(raw: object, place: int) -> Planned:
    if not isinstance(raw, dict):
        raise TraceError("expected an object")
    prompt, max_tokens, at_s = raw.get("prompt"), raw.get("max_tokens"), raw.get("at_s")
    if not isinstance(prompt, list) or not prompt or not all(_is_count(token) for token in prompt):
        raise TraceError("prompt is not a list of token ids")
    if not _is_count(max_tokens) or max_tokens < 1:
        raise TraceError(f"max_tokens is {max_tokens!r}")
    planned = Planned(prompt=Tokens(tuple(prompt)), max_tokens=max_tokens, at_s=0.0)
    if at_s is None:
        return planned if place == 0 else replace(planned, at_s=None, after=place - 1)
    if not isinstance(at_s, int | float) or isinstance(at_s, bool) or not 0 <= at_s < float("inf"):
        raise TraceError(f"at_s is {at_s!r}, not a number of seconds")
    return replace(planned, at_s=float(at_s))


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
