"""AIPerf, a load generator that is not ours, replays a trace against the gateway and measures what we measure.

It is installed into an environment of its own. Of each of its requests the gateway has a record, by the request's id,
so that both tell of the same milliseconds; so it has of our own runner's, which replays the trace on the same server
afterwards.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

import polars as pl
import pytest

from moonshard.experiments.common.running.deployment import deployed
from moonshard.experiments.common.running.server import RunningServer
from moonshard.experiments.common.trace_file import write_trace
from moonshard.experiments.reading.tables.run_tables import load_runs
from moonshard.experiments.replay.synthetic import agent_trace
from moonshard.serving.config.reading import load_config
from moonshard.serving.observe.rows.parts import read_table
from moonshard.serving.observe.rows.schema import REQUESTS
from tests.clients.environments import python_environment
from tests.clients.hub import TOKENIZER, hub_with_the_tokenizer

NUM_REQUESTS, MAX_PROMPT_TOKENS, OUTPUT_TOKENS = 24, 3600, 64
CONFIG = """
warmup_requests = 0
[workload]
kind = "trace"
path = "trace.jsonl"
"""

pytestmark = [pytest.mark.alone, pytest.mark.xdist_group("cluster"), pytest.mark.timeout(900)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Milliseconds by request."""

    ttft_ms: Sequence[float]
    itl_ms: Sequence[float]  # the mean of a request's gaps


@pytest.fixture(scope="module")
def aiperf() -> Path:
    """The program; the test is skipped where it cannot be installed."""
    return python_environment("aiperf") / "aiperf"


def test_a_load_generator_that_is_not_ours_agrees_with_us(aiperf: Path, tmp_path: Path):
    trace = tmp_path / "trace.jsonl"
    fitting = [one for one in agent_trace(36, num_turns=3, over_s=130.0) if one.input_tokens <= MAX_PROMPT_TOKENS]
    write_trace(trace, [replace(one, output_tokens=OUTPUT_TOKENS) for one in fitting[:NUM_REQUESTS]])
    config = load_config(None, ("model.max_context_tokens=4096", f"trace.path={tmp_path / 'recorded'}"))
    with deployed(config, os.environ) as deployment:
        theirs = replayed(aiperf, deployment.server, trace, tmp_path / "aiperf")
        ours = replayed_by_us(deployment.server, tmp_path)
    recorded = read_table(tmp_path / "recorded", REQUESTS)
    found = seen([theirs[name] for name in sorted(theirs)], "time_to_first_token", "inter_token_latency")
    assert_alike(found, by_the_gateway(recorded, sorted(theirs)))
    ours = ours.sort("request_id")
    assert_alike(
        Seen(ttft_ms=ours["ttft_ms"].to_list(), itl_ms=ours["tpot_ms"].to_list()),
        by_the_gateway(recorded, ours["request_id"].to_list()),
    )


def by_the_gateway(recorded: pl.DataFrame, request_ids: Sequence[str]) -> Seen:
    of_these = recorded.filter(pl.col("request_id").is_in(request_ids)).sort("request_id")
    assert of_these.height == len(request_ids) == NUM_REQUESTS
    assert set(of_these["outcome"]) == {"completed"}
    assert set(of_these["completion_tokens"]) == {OUTPUT_TOKENS}
    assert of_these["cached_tokens"].to_numpy().sum() > 0
    gaps = of_these["completion_tokens"] - 1
    return Seen(ttft_ms=(of_these["ttft_ns"] / 1e6).to_list(), itl_ms=(of_these["decode_ns"] / gaps / 1e6).to_list())


def assert_alike(found: Seen, gateway: Seen) -> None:
    """Within 5%, in the mean and in the median."""
    for of in (mean, median):
        assert of(found.ttft_ms) == pytest.approx(of(gateway.ttft_ms), rel=0.05)
        assert of(found.itl_ms) == pytest.approx(of(gateway.itl_ms), rel=0.05)


def replayed(
    aiperf: Path, server: RunningServer, trace: Path, out: Path
) -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    """What AIPerf says of each request, by its id at the gateway."""
    argv = [
        *(aiperf, "profile", "--model", server.model, "--tokenizer", TOKENIZER),
        *("--url", server.http, "--endpoint-type", "chat", "--streaming"),
        *("--input-file", trace, "--custom-dataset-type", "mooncake_trace", "--fixed-schedule"),
        *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0", "--use-server-token-count"),
        *("--ui", "none", "--no-server-metrics", "--no-gpu-telemetry", "--workers-max", "1", "--artifact-dir", out),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub_with_the_tokenizer(out.parent))}
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (export,) = out.rglob("profile_export.jsonl")
    rows = [json.loads(line) for line in export.read_text().splitlines()]
    assert [row.get("error") for row in rows] == [None] * NUM_REQUESTS
    return {f"chatcmpl-{row['metadata']['x_request_id']}": row["metrics"] for row in rows}


def replayed_by_us(server: RunningServer, folder: Path) -> pl.DataFrame:
    """The rows of our runner's requests."""
    (folder / "config.toml").write_text(CONFIG)
    command = [sys.executable, "-m", "moonshard.experiments.command", "run", str(folder)]
    argv = [*command, "--url", server.grpc, "--out", str(folder / "results")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = (folder / "results" / folder.name).iterdir()
    return load_runs(run).requests


def seen(metrics: Sequence[Mapping[str, Mapping[str, float]]], ttft: str, itl: str) -> Seen:
    return Seen(ttft_ms=[one[ttft]["value"] for one in metrics], itl_ms=[one[itl]["value"] for one in metrics])
