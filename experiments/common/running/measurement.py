"""What a benchmark run gives: named samples, what is computed from them, and the sizes that were asked for.

Imports neither jax nor the server, so that the process that measures the device and the one that prints can share it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Unit = Literal["ms", "us", "s", "MiB", "tokens/s", "GB/s", "share", "ratio", "count"]
Level = Literal[
    "device",
    "start",
    "served",
    "disaggregated",
    "transports",
    "handoff",
    "meshes",
    "routing",
    "speculation",
    "gateway",
    "recording",
    "arrangements",
    "failover",
    "constrained",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How much is measured. A round runs every part once, so that the machine's noise hits all of them alike."""

    prompt_tokens: tuple[int, ...] = (128, 512, 2048)
    batches: tuple[int, ...] = (1, 8, 16)
    context_tokens: tuple[int, ...] = (128, 2048)  # before a decode step; the first is also every stream's prompt
    completion_tokens: int = 128
    rounds: int = 3
    repeats: int = 5  # of everything in a round, warm-up not counted
    cold_starts: int = 2
    warm_starts: int = 3
    peer_repeats: int = 3
    peer_decode_steps: int = 32
    compared_prompts: tuple[int, ...] = (512, 2048)  # beside peers
    compared_tokens: int = 128  # that each stream generates
    compared_samples: int = 5  # of each row and server
    compared_tries: int = 3  # of a sample that others disturbed
    compared_starts: int = 5
    loop_requests: int = 32
    loop_clients: int = 8
    loop_tokens: int = 32  # generated; the prompts are the shortest of those compared
    cached_repeats: int = 3  # of a prompt that is cached, in a sample
    transfer_bytes: tuple[int, ...] = (1 << 20, 16 << 20, 64 << 20)
    copy_bytes: tuple[int, ...] = (64 << 10, 1 << 20)  # of one contiguous range
    transfer_repeats: int = 21
    handoff_tokens: tuple[int, ...] = (512, 2048, 8000)
    handoff_repeats: int = 20
    reshard_repeats: int = 101
    pipeline_rows: int = 16  # sequences that decode together, shared out among the microbatches
    pipeline_context: int = 512
    pipeline_steps: int = 64  # of each microbatch, in a repeat
    pipeline_repeats: int = 7
    mesh_handoff_tokens: tuple[int, ...] = (512, 2048)
    mesh_handoff_repeats: int = 20
    decisions: int = 20_000  # of the router
    replay_sessions: int = 1000
    gateway_rounds: int = 3
    gateway_s: float = 12.0  # of one number of streams, directly or through the gateway
    gateway_tokens: int = 40  # of a stream
    token_rounds: int = 5
    token_s: float = 2.0  # of one number of streams over one wire
    recording_starts: int = 6  # of all deployments
    recording_rounds: int = 4  # from one start to the next
    recording_requests: int = 2  # of each client in a round
    row_repeats: int = 7
    arrangement_rounds: int = 3
    arrangement_s: float = 12.0  # at least, of load on one arrangement in one round
    num_streams: int = 8  # beside the long prompts of the arrangements, and under failover
    long_prompt_tokens: int = 2048
    long_prompt_every_s: float = 1.0  # at least; where one takes long to prefill, more
    constrained_rounds: int = 3
    speculation_turns: int = 16  # of each kind
    kills: int = 4
    sizes_repeats: int = 7  # of every candidate
    tier_blocks: tuple[int, ...] = (1, 2, 4, 8, 16, 32)  # of one call
    tier_repeats: int = 9
    killed_tokens: int = 512  # each stream's, long enough to be there when its worker is killed


QUICK = Plan(
    rounds=1,
    cold_starts=1,
    warm_starts=1,
    peer_repeats=2,
    compared_tokens=16,
    compared_samples=1,
    compared_tries=1,
    compared_starts=1,
    loop_requests=8,
    loop_tokens=8,
    transfer_repeats=7,
    reshard_repeats=21,
    pipeline_repeats=3,
    mesh_handoff_repeats=5,
    decisions=2000,
    replay_sessions=200,
    gateway_rounds=1,
    gateway_s=6.0,
    token_rounds=2,
    recording_starts=2,
    recording_rounds=1,
    row_repeats=2,
    arrangement_rounds=1,
    constrained_rounds=1,
    speculation_turns=8,
    kills=2,
    sizes_repeats=2,
    tier_blocks=(1, 8),
    tier_repeats=3,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Samples of one quantity. A quantity that is only counted has one sample."""

    level: Level
    name: str
    unit: Unit
    samples: tuple[float, ...]
    note: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.level, self.name

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    def quantile(self, q: float) -> float:
        """Interpolated linearly between the two nearest samples."""
        ordered = sorted(self.samples)
        place = q * (len(ordered) - 1)
        low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
        return low + (high - low) * (place - math.floor(place))


def merge(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Joins samples of the same quantity, in the order of first appearance."""
    merged: dict[tuple[str, str], Measurement] = {}
    for one in measurements:
        before = merged.get(one.key)
        merged[one.key] = replace(one, samples=before.samples + one.samples) if before else one
    return list(merged.values())


def as_json(measurement: Measurement) -> dict[str, object]:
    return {
        "level": measurement.level,
        "name": measurement.name,
        "unit": measurement.unit,
        "median": measurement.median,
        "p90": measurement.quantile(0.9),
        "p99": measurement.quantile(0.99),
        "min": min(measurement.samples),
        "max": max(measurement.samples),
        "samples": [round(sample, 5) for sample in measurement.samples],
    }
