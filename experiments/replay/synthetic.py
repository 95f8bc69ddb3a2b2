"""Traces of agents' sessions that can be shown to everybody, for when no public trace is at hand.

Each session begins with one of a few system prompts and comes again and again with all of its context and something
new, as coding agents do. The same seed gives the same trace. `agent_trace` is the plain one. `coding_agent_trace` has
what makes a cache lose agents: most of them come back within seconds, some after minutes or hours, many never.
"""

import math
import random
from collections.abc import Iterator

from moonshard.experiments.common.trace_file import BLOCK_TOKENS, TracedRequest

NUM_SYSTEM_PROMPTS = 5
SYSTEM_BLOCKS = 4
MEAN_THINK_S = 20.0
MEAN_NEW_TOKENS = 1200.0
NUM_OUTPUT_TOKENS = 200

# of coding agents: log-normal by median and sigma; where they are from is said at `coding_agent_trace`
TURNS = 0.61, 2.3  # of a session, rounded up, as is the next
STEPS = 1.5, 1.85  # of a turn
NEW_TOKENS = 875.0, 1.157  # of a step
ANSWER_S = 5.7, 1.06
TOOL_S = 0.456, 2.787
HUMAN_S = 84.0, 2.098
CODING_SYSTEM_BLOCKS = 24
MAX_CONTEXT_TOKENS = 200_000
SUMMARY_TOKENS = 8192


def agent_trace(num_sessions: int, *, num_turns: int = 12, over_s: float = 600.0, seed: int = 0) -> list[TracedRequest]:
    """Sessions begin evenly over `over_s`; their turns follow after thinking. In order of time."""
    draw = random.Random(seed)
    found = [request for number in range(num_sessions) for request in _session(number, num_turns, over_s, draw)]
    return sorted(found, key=lambda request: request.timestamp_ms)


def coding_agent_trace(num_sessions: int, *, over_s: float = 7200.0, seed: int = 0) -> list[TracedRequest]:
    """Sessions begin evenly over `over_s`, and the trace ends then. In order of time.

    Each step is a request. After its answer a tool runs, or, after the last of a turn, a human thinks; then comes the
    next step, with all that was there and something new. A context that would be too long is replaced by a summary
    behind the system prompt. More than half of the sessions are abandoned after their first turn, and nothing says so.

    Log-normal are:
        tool calls: that distribution of which 3.97% take more than a minute and these 84.7% of all tool time;
        a human's thinking: 84 s in the median, 20.6 minutes at 90%;
        answers: 5.7 s in the median, 22.2 s at 90%;
        new tokens of a step: 875 in the median, 1,709 in the mean;
        turns of a session: one of 58.5%, 9 in the mean;
        steps of a turn: 2 in the median, 9 in the mean.

    Source: TraceLab (arXiv:2606.30560, and the tables in its repository's artifacts), 357,161 steps of Claude Code and
    Codex. System prompts of 12,288 tokens are about what Codex begins with (Inferact/codex_swebenchpro_traces). Made up
    are the longest context and the summary's length, and that turns and steps do not depend on each other.
    """
    draw = random.Random(seed)
    found = [request for number in range(num_sessions) for request in _coding_session(number, over_s, draw)]
    return sorted(found, key=lambda request: request.timestamp_ms)


def _session(number: int, num_turns: int, over_s: float, draw: random.Random) -> Iterator[TracedRequest]:
    """Block numbers below `NUM_SYSTEM_PROMPTS * SYSTEM_BLOCKS` are those of system prompts."""
    prompt = draw.randrange(NUM_SYSTEM_PROMPTS)
    shared = tuple(range(prompt * SYSTEM_BLOCKS, (prompt + 1) * SYSTEM_BLOCKS))
    first_own = (number + 1) * 1_000_000
    at_s, num_tokens = draw.uniform(0, over_s), SYSTEM_BLOCKS * BLOCK_TOKENS
    for turn in range(num_turns):
        num_tokens += 1 + round(draw.expovariate(1 / MEAN_NEW_TOKENS))
        num_full, is_rest = num_tokens // BLOCK_TOKENS - SYSTEM_BLOCKS, num_tokens % BLOCK_TOKENS > 0
        own = (*range(first_own, first_own + num_full), *([first_own + 100_000 + turn] if is_rest else []))
        yield TracedRequest(1e3 * at_s, num_tokens, NUM_OUTPUT_TOKENS, shared + own)
        at_s += draw.expovariate(1 / MEAN_THINK_S)


def _coding_session(number: int, over_s: float, draw: random.Random) -> Iterator[TracedRequest]:
    """Block numbers are as in `_session`; no block is numbered twice."""
    prompt = draw.randrange(NUM_SYSTEM_PROMPTS)
    shared = list(range(prompt * CODING_SYSTEM_BLOCKS, (prompt + 1) * CODING_SYSTEM_BLOCKS))
    blocks, num_tokens, unused = shared.copy(), len(shared) * BLOCK_TOKENS, (number + 1) * 1_000_000
    at_s = draw.uniform(0, over_s)
    for wait_s in _waits_s(draw):
        num_tokens += max(1, round(_log_normal(draw, NEW_TOKENS)))
        if num_tokens > MAX_CONTEXT_TOKENS:
            blocks, num_tokens = shared.copy(), len(shared) * BLOCK_TOKENS + SUMMARY_TOKENS
        num_more = num_tokens // BLOCK_TOKENS - len(blocks)
        blocks += range(unused, unused + num_more)
        unused += num_more + 1
        rest = [unused - 1] if num_tokens % BLOCK_TOKENS else []
        yield TracedRequest(1e3 * at_s, num_tokens, NUM_OUTPUT_TOKENS, (*blocks, *rest))
        at_s += _log_normal(draw, ANSWER_S) + wait_s
        if at_s >= over_s:
            return


def _waits_s(draw: random.Random) -> Iterator[float]:
    """How long a tool, or a human, takes after each step of a session."""
    for _ in range(math.ceil(_log_normal(draw, TURNS))):
        for _ in range(math.ceil(_log_normal(draw, STEPS)) - 1):
            yield _log_normal(draw, TOOL_S)
        yield _log_normal(draw, HUMAN_S)


def _log_normal(draw: random.Random, median_sigma: tuple[float, float]) -> float:
    median, sigma = median_sigma
    return median * math.exp(draw.gauss(0, sigma))
