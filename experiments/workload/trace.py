"""A trace in Mooncake's format as a workload: its times, its lengths, and what its prompts have in common.

What is in a prompt no trace tells: blocks of equal number are made of equal tokens.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from random import Random

from moonshard.experiments.common.trace_file import BLOCK_TOKENS, TracedRequest
from moonshard.experiments.workload.blocks import BlockPrompt
from moonshard.experiments.workload.plan import Planned, Workload, WorkloadError

MAX_SPAN_S = 1e9  # from the first request to the last: beyond that a stamp is none
BIN_MS = 3000  # Mooncake's own traces tell the time in steps of so many milliseconds


def bin_s(traced: Sequence[TracedRequest]) -> float:
    """Seconds that a stamp may be early: one of Mooncake's bins where all are multiples of it, else 0."""
    return BIN_MS / 1e3 if all(one.timestamp_ms % BIN_MS == 0 for one in traced) else 0.0


def from_trace(
    traced: Sequence[TracedRequest],
    *,
    vocab_size: int,
    max_context_tokens: int,
    jitter_s: float = 0.0,
    time_scale: float = 1.0,
    length_scale: float = 1.0,
    clips: bool = False,
    seed: int = 0,
) -> Workload:
    """Each request at its stamp, or at random up to `jitter_s` later, so that those of one bin are spread.

    The first stamp is the beginning: a slice of a trace does not wait for what came before it.

    Args:
        traced: in the order of their time.
        jitter_s: of the trace's time, as its stamps are.
        time_scale: 0.5 sends twice as many requests a second.
        length_scale: of prompts and completions; blocks shrink with them, so that the same prompts begin alike.
        clips: cut what does not fit into the context, and count it; else it is refused.

    Raises:
        WorkloadError: stamps that go back or never come, or a request that does not fit, with its line.
    """
    for option, value in (("time_scale", time_scale), ("length_scale", length_scale)):
        if not value > 0:
            raise WorkloadError(f"{option} is {value:g}")
    for before, after in pairwise(traced):
        if after.timestamp_ms < before.timestamp_ms:
            raise WorkloadError(f"{_place(after)}: its timestamp is less than that of the one before")
    random, block_tokens = Random(seed), max(1.0, BLOCK_TOKENS * length_scale)
    begin_ms = traced[0].timestamp_ms if traced else 0.0
    found: list[Planned] = []
    num_clipped = 0
    for one in traced:
        num_prompt, max_tokens, is_cut = _lengths(one, length_scale, max_context_tokens, clips)
        num_clipped += is_cut
        prompt = BlockPrompt(
            blocks=_enough(one.blocks, num_prompt, block_tokens),
            num_tokens=num_prompt,
            block_tokens=block_tokens,
            vocab_size=vocab_size,
            seed=seed,
        )
        at_s = time_scale * ((one.timestamp_ms - begin_ms) / 1e3 + random.random() * jitter_s)
        if at_s > MAX_SPAN_S:
            raise WorkloadError(f"{_place(one)}: comes {at_s:g} s after the first one")
        found.append(Planned(prompt=prompt, max_tokens=max_tokens, at_s=at_s))
    return Workload(requests=sorted(found, key=lambda request: request.at_s or 0.0), num_clipped=num_clipped)


def _lengths(one: TracedRequest, length_scale: float, max_context_tokens: int, clips: bool) -> tuple[int, int, bool]:
    """The lengths of prompt and completion, and whether they were cut. WorkloadError where they do not fit."""
    num_prompt = max(1, round(one.input_tokens * length_scale))
    max_tokens = max(1, round(one.output_tokens * length_scale))
    if num_prompt + max_tokens <= max_context_tokens:
        return num_prompt, max_tokens, False
    if not clips:
        both = f"{num_prompt} + {max_tokens} tokens"
        raise WorkloadError(f"{_place(one)}: {both} are more than a context of {max_context_tokens}")
    max_tokens = min(max_tokens, max_context_tokens - 1)
    return min(num_prompt, max_context_tokens - max_tokens), max_tokens, True


def _enough(blocks: tuple[int, ...], num_tokens: int, block_tokens: float) -> tuple[int, ...]:
    """Rounding may need a block more than the trace names: the last one again, which only its own prompt has."""
    num_blocks = math.ceil(num_tokens / block_tokens)
    while round(num_blocks * block_tokens) < num_tokens:
        num_blocks += 1
    return (blocks + blocks[-1:] * (num_blocks - len(blocks)))[:num_blocks]


def _place(one: TracedRequest) -> str:
    return "a request" if one.line is None else f"line {one.line}"
