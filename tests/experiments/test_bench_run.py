"""A miniature of `moonshard bench`: every figure of its tables is there, and could be true."""

import json
import math
import os

import pytest
from rich.console import Console

from moonshard.experiments.bench.command import DEVICE_PARTS, run_bench, write
from moonshard.experiments.bench.measurement import Measurement, Plan
from moonshard.experiments.bench.report import Report, tables
from moonshard.serving.config_file import load_config

MINIATURE = Plan(
    prompt_tokens=(8, 20),
    batches=(1, 2),
    context_tokens=(8, 16),
    completion_tokens=6,
    rounds=2,
    repeats=1,
    cold_starts=1,
    warm_starts=1,
)
SETTINGS = (
    *("model.max_context_tokens=128", "kv.num_blocks=64", "kv.block_size=16"),
    *("prefill.chunk_tokens=32", "decode.max_slots=2"),
)
MAY_BE_ZERO = ("compilations while serving", "device idle", "overlapped", "processor time", "load generator")
MAY_BE_NEGATIVE = ("overhead",)  # differences of two processes' clocks


@pytest.fixture(scope="module")
def report() -> Report:
    sections = (*DEVICE_PARTS, "start", "served")
    return run_bench(load_config(None, SETTINGS), MINIATURE, sections, os.environ, Console(quiet=True))


def expected_names() -> set[str]:
    prompts, batches, contexts = MINIATURE.prompt_tokens, MINIATURE.batches, MINIATURE.context_tokens
    of_batch = (
        *("engine step", "device idle between engine steps", "overlapped decode steps, engine"),
        *("ITL", "TPOT", "output tokens", "TTFT under load", "overlapped decode steps", "sequences in a decode step"),
        *("overhead before the first token", "overhead per later token", "overhead after the last token"),
        *(f"processor time per token, {role}" for role in ("gateway", "worker", "client")),
        "load generator's share of a core",
    )
    return {
        *(f"prefill, {n} tokens" for n in prompts),
        *(f"decode step, batch {b}, context {c}" for b in batches for c in contexts),
        *(f"TTFT, {n} prompt tokens, {protocol}" for n in prompts for protocol in ("gRPC", "HTTP")),
        *(f"{name}, batch {b}" for name in of_batch for b in batches),
        *(f"{what} after exec, {cache} cache" for what in ("ready", "first token") for cache in ("cold", "warm")),
        *("compilations while serving", "peak memory, gateway", "peak memory, worker"),
    }


@pytest.mark.slow
@pytest.mark.xdist_group("bench")
class TestMiniatureRun:
    def test_every_figure_is_present(self, report: Report):
        names = [one.name for one in report.measurements]
        writes = [name for name in names if name.startswith("KV write of a step")]
        assert len(writes) == 2
        assert set(names) - set(writes) == expected_names()
        assert len(names) == len(set(names))

    def test_every_sample_is_finite_and_plausible(self, report: Report):
        implausible = [one for one in report.measurements if not all(map(_is_plausible(one), one.samples))]
        assert implausible == []

    def test_rounds_add_their_samples_up(self, report: Report):
        by_name = {one.name: len(one.samples) for one in report.measurements}
        gaps = MINIATURE.completion_tokens - 1
        assert by_name["TTFT, 20 prompt tokens, HTTP"] == MINIATURE.rounds * MINIATURE.repeats
        assert by_name["ITL, batch 2"] == MINIATURE.rounds * MINIATURE.repeats * 2 * gaps

    def test_nothing_is_compiled_while_serving(self, report: Report):
        (compiled,) = (one for one in report.measurements if one.name == "compilations while serving")
        assert compiled.samples == (0.0,)

    def test_the_first_token_comes_after_the_ready_line(self, report: Report):
        medians = {one.name: one.median for one in report.measurements if one.level == "start"}
        for cache in ("cold", "warm"):
            assert medians[f"ready after exec, {cache} cache"] < medians[f"first token after exec, {cache} cache"]

    def test_the_file_holds_what_the_tables_show(self, report: Report, tmp_path):
        written = json.loads(write(report, tmp_path).read_bytes())
        assert sum(table.row_count for table in tables(report)) == len(written["measurements"])
        assert written["config"]["decode.max_slots"] == "2"
        assert written["machine"]["cores"] >= 1
        assert written["versions"]["jax"]


def _is_plausible(one: Measurement):
    def check(sample: float) -> bool:
        if not math.isfinite(sample) or abs(sample) > 1e7:
            return False
        if one.unit == "share" and sample > 1.5:
            return False
        return one.name.startswith(MAY_BE_NEGATIVE) or sample > 0 or (sample == 0 and one.name.startswith(MAY_BE_ZERO))

    return check
