"""`moonshard router-replay`: reads the trace and the options, and prints the figures."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import tyro

from moonshard.experiments.common.trace_file import TraceError, read_trace
from moonshard.experiments.replay.replay import ReplayConfig, Replayed, replay
from moonshard.serving.control.routing.names import QUEUE_WEIGHT, PolicyName


def router_replay(
    trace: Annotated[Path, tyro.conf.arg(metavar="FILE")],
    workers: int = 8,
    policy: PolicyName = "cost",
    tokens_per_s: float = 6000.0,
    blocks_per_worker: int | None = None,
    queue_weight: float = QUEUE_WEIGHT,
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
        json_file: also write the figures here.
    """
    for option, value in (("--workers", workers), ("--blocks-per-worker", blocks_per_worker)):
        if value is not None and value < 1:
            return _refuse(f"{option} {value}: expected at least 1")
    if not 0 < tokens_per_s < float("inf"):
        return _refuse(f"--tokens-per-s {tokens_per_s:g}: expected a number above 0")
    if not 0 <= queue_weight < float("inf"):
        return _refuse(f"--queue-weight {queue_weight:g}: expected a number from 0 on")
    config = ReplayConfig(
        num_workers=workers,
        policy=policy,
        tokens_per_s=tokens_per_s,
        blocks_per_worker=blocks_per_worker,
        queue_weight=queue_weight,
    )
    try:
        found = replay(read_trace(trace), config)
    except OSError as error:
        return _refuse(f"--trace {trace}: {error.strerror}")
    except (TraceError, ValueError) as error:
        return _refuse(str(error))
    sys.stdout.write(_lines(found, config))
    if json_file is not None:
        try:
            json_file.write_text(json.dumps(asdict(found) | {"config": asdict(config)}, indent=1) + "\n")
        except OSError as error:
            return _refuse(f"--json {json_file}: {error.strerror}")
    return 0


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


def _refuse(message: str) -> int:
    sys.stderr.write(f"moonshard router-replay: {message}\n")
    return 2
