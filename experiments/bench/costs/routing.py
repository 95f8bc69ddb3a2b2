"""The router alone: how long a decision takes among a thousand workers, and what each policy finds again of a trace.

No process but this one, and no device. Names of blocks are as long as real ones; what a worker has told is put into the
index as its events would put it.
"""

import random
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import get_args

import numpy as np

from moonshard.experiments.common.grid import Grid, number, verdict
from moonshard.experiments.common.running.measurement import Measurement, Plan
from moonshard.experiments.common.trace_file import TracedRequest
from moonshard.experiments.replay.replay import ReplayConfig, Replayed, replay
from moonshard.experiments.replay.synthetic import agent_trace
from moonshard.kv.prefix import NAME_BYTES, block_names, root_name, split_names
from moonshard.serving.control.routing.names import PolicyName
from moonshard.serving.control.routing.policies import policy_of
from moonshard.serving.control.routing.router import Ask, Home, Reservation, Router

NUM_WORKERS = 1000
BLOCKS_PER_WORKER = 1000
BLOCK_SIZE = 64
SYSTEM_BLOCKS = 16  # that every worker knows, from its system prompt
SESSION_BLOCKS = 123  # of its own that a session has: eight sessions fill a worker
NEW_BLOCKS = 8  # that a turn adds and nobody knows
VOCAB_SIZE = 160_000
DECISION, HASHING, EVENT = "decision", "hashing the prompt", "taking in an event"
DECISION_BAR_US = 1000.0
LOAD_BAR, HIT_BAR = 1.1, 0.01
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
DEFAULT_RATE = 6000.0  # tokens/s, of every policy
RATES = (4000.0, DEFAULT_RATE, 10_000.0)  # of policy cost
SPEED_COLUMNS = (
    f"{NUM_WORKERS:,} workers, {NUM_WORKERS * BLOCKS_PER_WORKER:,} blocks",
    "p50, us",
    "p99, us",
    "n",
    f"bar {DECISION_BAR_US:,.0f} us at p99",
)
REPLAY_COLUMNS = ("policy", "tokens/s", "found again", "points below the oracle", "load, max / mean", "bar of `cost`")


def measure_routing(plan: Plan, trace: Sequence[TracedRequest] | None) -> list[Measurement]:
    """Times decisions and replays each policy over `trace`, or over a generated trace where it is None."""
    requests = agent_trace(plan.replay_sessions) if trace is None else trace
    found = [*_speeds(plan.decisions)]
    for name in POLICIES:
        for rate in RATES if name == "cost" else (DEFAULT_RATE,):
            found += _shares(name, rate, replay(requests, ReplayConfig(policy=name, tokens_per_s=rate)))
    return found


def _speeds(num_decisions: int) -> Iterator[Measurement]:
    draw, names = random.Random(0), np.random.default_rng(0)
    router, homes = Router(), tuple(Home(f"10.0.{i // 256}.{i % 256}:50051", 0) for i in range(NUM_WORKERS))
    system = _names(names, SYSTEM_BLOCKS)
    num_sessions = NUM_WORKERS * (BLOCKS_PER_WORKER - SYSTEM_BLOCKS) // SESSION_BLOCKS
    sessions = [system + _names(names, SESSION_BLOCKS) for _ in range(num_sessions)]
    yield _samples(EVENT, _tell(router, homes, sessions))
    prompts = (draw.choice(sessions) + _names(names, NEW_BLOCKS) for _ in range(num_decisions))
    yield _samples(DECISION, _decide(router, homes, prompts, draw))
    yield _samples(HASHING, _hash(names, num_decisions // 10))


def _decide(
    router: Router, homes: tuple[Home, ...], prompts: Iterable[Sequence[bytes]], draw: random.Random
) -> list[float]:
    """Seconds per decision, with as many requests under way as there are workers."""
    choose, took, under_way = policy_of("cost"), [], deque[Reservation]()
    for prompt in prompts:
        num_tokens = len(prompt) * BLOCK_SIZE
        ask = Ask(num_tokens=num_tokens, num_prompt=num_tokens, is_prefill=True, names=prompt, block_size=BLOCK_SIZE)
        router.report(draw.choice(homes), draw.randrange(20_000))
        start_s = time.perf_counter()
        reservation = router.reserve(homes, ask, policy=choose)
        took.append(time.perf_counter() - start_s)
        assert reservation is not None  # there are homes
        router.sent(reservation, now_s=0.0)
        under_way.append(reservation)
        if len(under_way) > NUM_WORKERS:
            router.release(under_way.popleft())
    return took


def _hash(draw: np.random.Generator, count: int) -> list[float]:
    """Seconds for hashing one prompt."""
    took = []
    for _ in range(count):
        tokens = draw.integers(VOCAB_SIZE, size=(SYSTEM_BLOCKS + SESSION_BLOCKS + NEW_BLOCKS) * BLOCK_SIZE)
        start_s = time.perf_counter()
        block_names(root_name(b"model"), tokens, BLOCK_SIZE)
        took.append(time.perf_counter() - start_s)
    return took


def _names(draw: np.random.Generator, count: int) -> list[bytes]:
    return split_names(draw.bytes(count * NAME_BYTES))


def _tell(router: Router, homes: Sequence[Home], sessions: Sequence[Sequence[bytes]]) -> list[float]:
    """Seconds per event of each session's names. Sessions go to the workers in turn, each with its system prompt."""
    took = []
    for index, names in enumerate(sessions):
        home = router.home_number(homes[index % len(homes)])
        start_s = time.perf_counter()
        for name in names:
            router.index.add(home, name)
        took.append((time.perf_counter() - start_s) / len(names))
    return took


def _samples(name: str, seconds: Sequence[float]) -> Measurement:
    return Measurement(level="routing", name=name, unit="us", samples=tuple(1e6 * one for one in seconds))


def _shares(name: PolicyName, rate: float, found: Replayed) -> list[Measurement]:
    found_again = [
        Measurement(level="routing", name=_share_name(name, rate, kind), unit="share", samples=(value,))
        for kind, value in (("found", found.hit_rate), ("oracle", found.oracle_hit_rate))
    ]
    load = _share_name(name, rate, "load")
    return [*found_again, Measurement(level="routing", name=load, unit="ratio", samples=(found.load_max_over_mean,))]


def _share_name(name: PolicyName, rate: float, kind: str) -> str:
    return f"{name} at {rate:g} tokens/s, {kind}"


def speed_grid(measurements: Sequence[Measurement], _plan: Plan) -> Grid:
    by_name = {one.name: one for one in measurements if one.level == "routing"}
    rows = []
    for name in (DECISION, HASHING, EVENT):
        if (one := by_name.get(name)) is not None:
            p99 = one.quantile(0.99)
            held = verdict(p99 < DECISION_BAR_US) if name == DECISION else ""
            rows.append((name, number(one.median), number(p99), f"{len(one.samples):,}", held))
    blocks = SYSTEM_BLOCKS + SESSION_BLOCKS + NEW_BLOCKS
    notes = (
        f"Routing: prompts of {blocks} blocks of {BLOCK_SIZE} tokens, {SYSTEM_BLOCKS} of them known to every worker "
        f"and {NEW_BLOCKS} to none; a report of one worker between two decisions.",
    )
    return Grid(title="Router: speed", columns=SPEED_COLUMNS, rows=tuple(rows), notes=notes if rows else ())


def replay_grid(measurements: Sequence[Measurement], _plan: Plan) -> Grid:
    shares = {one.name: one.samples[0] for one in measurements if one.level == "routing"}
    rows = []
    for name in POLICIES:
        for rate in RATES:
            found, oracle, load = (shares.get(_share_name(name, rate, kind)) for kind in ("found", "oracle", "load"))
            if found is None or oracle is None or load is None:
                continue
            held = verdict(oracle - found <= HIT_BAR and load <= LOAD_BAR) if name == "cost" else ""
            cells = (f"{rate:,.0f}", f"{found:.2%}", f"{100 * (oracle - found):.2f}", f"{load:.3f}", held)
            rows.append((f"`{name}`", *cells))
    notes = ("Replay: 8 workers, each a queue of uncached prompt tokens and a cache without bound.",)
    return Grid(title="Router: a trace replayed", columns=REPLAY_COLUMNS, rows=tuple(rows), notes=notes if rows else ())
