"""A trace of agents' sessions that can be shown to everybody, for when no public trace is at hand.

Each session begins with one of a few system prompts and comes again and again with all of its context and something
new, as coding agents do. The same seed gives the same trace.
"""

import random
from collections.abc import Iterator

from moonshard.experiments.common.trace_file import BLOCK_TOKENS, TracedRequest

NUM_SYSTEM_PROMPTS = 5
SYSTEM_BLOCKS = 4
MEAN_THINK_S = 20.0
MEAN_NEW_TOKENS = 1200.0
NUM_OUTPUT_TOKENS = 200


def agent_trace(num_sessions: int, *, num_turns: int = 12, over_s: float = 600.0, seed: int = 0) -> list[TracedRequest]:
    """Sessions begin evenly over `over_s`; their turns follow after thinking. In order of time."""
    draw = random.Random(seed)
    found = [request for number in range(num_sessions) for request in _session(number, num_turns, over_s, draw)]
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
