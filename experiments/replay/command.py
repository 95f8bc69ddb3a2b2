"""`moonshard router-replay`: reads the trace and the options, and prints the figures."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import tyro

from moonshard.experiments.common.trace_file import TracedRequest, TraceError, read_trace
from moonshard.experiments.replay.replay import ReplayConfig, Replayed, replay
from moonshard.experiments.replay.synthetic import coding_agent_trace
from moonshard.experiments.replay.tiered import BLOCK_BYTES, TieredConfig, TieredReplayed, replay_tiered
from moonshard.experiments.replay.tiered_table import tiered_table
from moonshard.experiments.replay.tiers import RetentionName, TierConfig, tier_of
from moonshard.serving.control.routing.names import QUEUE_WEIGHT, PolicyName


class _Refused(Exception):
    """The message names the option."""


def router_replay(
    trace: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    workers: int = 8,
    policy: PolicyName = "cost",
    tokens_per_s: float = 6000.0,
    blocks_per_worker: int | None = None,
    queue_weight: float = QUEUE_WEIGHT,
    agents: Annotated[int | None, tyro.conf.arg(metavar="SESSIONS")] = None,
    seed: tuple[int, ...] = (),
    tiers: tuple[str, ...] = (),
    retention: tuple[RetentionName, ...] = (),
    block_bytes: int | None = None,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json", metavar="OUT")] = None,
) -> int:
    """Run the router alone over a trace in Mooncake's format: hits beside an unbounded cache's, and balance.

    Args:
        trace: one JSON object a line: timestamp, input_length, output_length, hash_ids.
        workers: prefill workers of one partition each.
        policy: how one is chosen.
        tokens_per_s: uncached prompt tokens that each works off.
        blocks_per_worker: of 512 tokens, that each keeps; without it all.
        queue_weight: of policy cost: what a token in the queue counts beside one to be computed.
        agents: instead of a trace: so many made-up sessions of coding agents, within two hours.
        seed: of the made-up sessions, 0 without it. With tiers there may be several: figures are means over them.
        tiers: below the blocks of each worker, the nearest first: NAME:BLOCKS[:BLOCK_MS[:FIXED_MS]][:RETENTION]. NAME
            is host or ssd, of which each worker has its own, or store, which they share. Fetching takes BLOCK_MS for a
            block and FIXED_MS for a fetch.
        retention: which blocks tiers keep that do not say it themselves, lru without it. Several are compared.
        block_bytes: of a block of 512 tokens in a tier; without it those of Kimi K2.
        json_file: also write the figures here.
    """
    config = ReplayConfig(
        num_workers=workers,
        policy=policy,
        tokens_per_s=tokens_per_s,
        blocks_per_worker=blocks_per_worker,
        queue_weight=queue_weight,
    )
    try:
        _check_numbers(config, agents, block_bytes)
        _check_together(trace, agents, seed)
        if tiers:
            configs = _tiered(config, tiers, retention or ("lru",), block_bytes or BLOCK_BYTES)
            said, written = _compare((_requests(trace, agents, each) for each in seed or (0,)), configs)
        else:
            _check_without_tiers(seed, retention, block_bytes)
            said, written = _replay(_requests(trace, agents, *seed or (0,)), config)
        sys.stdout.write(said)
        _write(json_file, written)
    except _Refused as refused:
        sys.stderr.write(f"moonshard router-replay: {refused}\n")
        return 2
    return 0


# ---- what is replayed


def _requests(trace: Path | None, agents: int | None, seed: int) -> list[TracedRequest]:
    if agents is not None:
        return coding_agent_trace(agents, seed=seed)
    assert trace is not None  # one of both is there
    try:
        return read_trace(trace)
    except OSError as error:
        raise _Refused(f"--trace {trace}: {error.strerror}") from error
    except TraceError as error:
        raise _Refused(str(error)) from error


def _replay(requests: Sequence[TracedRequest], config: ReplayConfig) -> tuple[str, Any]:
    try:
        found = replay(requests, config)
    except ValueError as error:
        raise _Refused(str(error)) from error
    return _lines(found, config), asdict(found) | {"config": asdict(config)}


def _compare(traces: Iterable[Sequence[TracedRequest]], configs: Mapping[str, TieredConfig]) -> tuple[str, Any]:
    """A run of each configuration for each trace."""
    runs: dict[str, list[TieredReplayed]] = {name: [] for name in configs}
    try:
        for requests in traces:
            for name, config in configs.items():
                runs[name].append(replay_tiered(requests, config))
    except ValueError as error:
        raise _Refused(str(error)) from error
    written = {name: {"config": asdict(configs[name]), "runs": [asdict(run) for run in runs[name]]} for name in runs}
    return tiered_table(runs), written


def _tiered(
    config: ReplayConfig, tiers: Sequence[str], retention: Sequence[RetentionName], block_bytes: int
) -> dict[str, TieredConfig]:
    """By the policy of the tiers that name none."""
    if config.blocks_per_worker is None:
        raise _Refused("--tiers: expected --blocks-per-worker: below what keeps everything nothing is found")
    found = {name: [_tier(text, name) for text in tiers] for name in retention}
    names = [tier.name for tier in found[retention[0]]]
    if len(set(names)) < len(names):
        raise _Refused(f"--tiers {' '.join(tiers)}: expected each name once")
    return {
        name: TieredConfig(routing=config, tiers=tuple(each), block_bytes=block_bytes) for name, each in found.items()
    }


def _tier(text: str, retention: RetentionName) -> TierConfig:
    try:
        return tier_of(text, retention)
    except ValueError as error:
        raise _Refused(f"--tiers {text}: {error}") from error


# ---- what is refused


def _check_numbers(config: ReplayConfig, agents: int | None, block_bytes: int | None) -> None:
    for option, value in (
        ("--workers", config.num_workers),
        ("--blocks-per-worker", config.blocks_per_worker),
        ("--agents", agents),
        ("--block-bytes", block_bytes),
    ):
        if value is not None and value < 1:
            raise _Refused(f"{option} {value}: expected at least 1")
    if not 0 < config.tokens_per_s < float("inf"):
        raise _Refused(f"--tokens-per-s {config.tokens_per_s:g}: expected a number above 0")
    if not 0 <= config.queue_weight < float("inf"):
        raise _Refused(f"--queue-weight {config.queue_weight:g}: expected a number from 0 on")


def _check_together(trace: Path | None, agents: int | None, seed: Sequence[int]) -> None:
    if (trace is None) == (agents is None):
        raise _Refused("--trace, --agents: expected one of them")
    if seed and agents is None:
        raise _Refused("--seed: expected --agents, which it is for")


def _check_without_tiers(seed: Sequence[int], retention: Sequence[str], block_bytes: int | None) -> None:
    if len(seed) > 1:
        raise _Refused(f"--seed {' '.join(map(str, seed))}: expected one, or --tiers")
    for option, is_given in (("--retention", bool(retention)), ("--block-bytes", block_bytes is not None)):
        if is_given:
            raise _Refused(f"{option}: expected --tiers, which it is for")


# ---- what is said


def _lines(found: Replayed, config: ReplayConfig) -> str:
    return (
        f"{found.num_requests:,} requests, {config.num_workers} workers of {config.tokens_per_s:,.0f} tokens/s, "
        f"policy {config.policy}\n"
        f"blocks found again      {found.hit_rate:7.2%}\n"
        f"one unbounded cache     {found.oracle_hit_rate:7.2%}\n"
        f"load, max / mean        {found.load_max_over_mean:7.3f}\n"
        f"decisions               {found.decisions_per_s:,.0f} a second; "
        f"p50 {found.decision_p50_us:.0f} us, p99 {found.decision_p99_us:.0f} us\n"
    )


def _write(path: Path | None, figures: Any) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(figures, indent=1) + "\n")
    except OSError as error:
        raise _Refused(f"--json {path}: {error.strerror}") from error
