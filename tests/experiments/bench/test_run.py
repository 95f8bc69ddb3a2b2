"""A miniature of `moonshard bench`: every figure of its tables is there, and could be true."""

import json
import math
import os
from pathlib import Path

import pytest
from rich.console import Console

from moonshard.experiments.bench.command import APART, DEVICE_PARTS, run_bench, write
from moonshard.experiments.bench.costs import recording_cost, row_cost
from moonshard.experiments.bench.meshes.hlo import COLLECTIVES
from moonshard.experiments.bench.meshes.tables import MESH_GRIDS, MESH_PAIRS
from moonshard.experiments.bench.report import Report, grids, tables
from moonshard.experiments.bench.serving import arrangements, failover, handoff
from moonshard.experiments.bench.serving.served import TOLD_TOGETHER
from moonshard.experiments.common.running.measurement import Measurement, Plan
from moonshard.experiments.common.running.server import HANDED_OVER
from moonshard.serving.config.reading import load_config

pytestmark = pytest.mark.timeout(1200)  # a fixture runs whole parts of the bench, whatever else the machine does
MINIATURE = Plan(
    prompt_tokens=(8, 20),
    batches=(1, 2),
    context_tokens=(8, 16),
    completion_tokens=6,
    rounds=2,
    repeats=1,
    cold_starts=1,
    warm_starts=1,
    transfer_bytes=(64 << 10,),
    copy_bytes=(16 << 10,),
    transfer_repeats=2,
    handoff_tokens=(20, 100),
    handoff_repeats=2,
    reshard_repeats=2,
    pipeline_rows=4,
    pipeline_context=16,
    pipeline_steps=8,
    pipeline_repeats=1,
    mesh_handoff_tokens=(20,),
    mesh_handoff_repeats=1,
    decisions=20,
    replay_sessions=5,
    gateway_rounds=1,
    gateway_s=1.0,
    gateway_tokens=4,
    recording_rounds=2,
    recording_requests=1,
    arrangement_rounds=1,
    arrangement_s=1.0,
    num_streams=4,
    long_prompt_tokens=100,
    long_prompt_every_s=0.3,
    kills=1,
    killed_tokens=100,
)
SETTINGS = (
    HANDED_OVER,
    f"model.path={Path(__file__).parents[2] / 'fixtures' / 'kimi_k2'}",
    *("model.max_context_tokens=128", "kv.num_blocks=64", "kv.block_size=16"),
    *("prefill.chunk_tokens=32", "decode.max_slots=4"),
)
MAY_BE_ZERO = (
    "compilations while serving",
    TOLD_TOGETHER,
    failover.FAILED,
    "device idle",
    "overlapped",
    "processor time",
    "load generator",
    *COLLECTIVES,
)
NUM_ROUTER_GRIDS = 2  # speed, and a trace replayed
NUM_RECORDING_GRIDS = 2  # deployments beside each other, and a row by itself
MAY_BE_NEGATIVE = ("overhead", "bubble")  # differences of two processes' clocks, or of two runs


def run(sections) -> Report:
    return run_bench(load_config(None, SETTINGS), MINIATURE, sections, os.environ, Console(quiet=True))


@pytest.fixture(scope="module")
def report() -> Report:
    return run((*DEVICE_PARTS, "start", "served"))


@pytest.fixture(scope="module")
def disaggregated() -> Report:
    return run(("disaggregated",))


@pytest.fixture(scope="module")
def apart() -> Report:
    return run(APART)


def expected_names() -> set[str]:
    prompts, batches, contexts = MINIATURE.prompt_tokens, MINIATURE.batches, MINIATURE.context_tokens
    of_batch = ("engine step", "device idle between engine steps", "overlapped decode steps, engine")
    return {
        *(f"prefill, {n} tokens" for n in prompts),
        *(f"decode step, batch {b}, context {c}" for b in batches for c in contexts),
        *(f"{name}, batch {b}" for name in of_batch for b in batches),
        *(f"{what} after exec, {cache} cache" for what in ("ready", "first token") for cache in ("cold", "warm")),
        *(
            f"peak memory until the first token, {r}, {c} cache"
            for r in ("gateway", "worker")
            for c in ("cold", "warm")
        ),
        *served_names(("gateway", "worker")),
    }


def served_names(roles: tuple[str, ...]) -> set[str]:
    prompts, batches = MINIATURE.prompt_tokens, MINIATURE.batches
    of_batch = (
        *(
            "ITL",
            TOLD_TOGETHER,
            "TPOT",
            "output tokens",
            "TTFT under load",
            "overlapped decode steps",
            "sequences in a decode step",
        ),
        *("overhead before the first token", "overhead per later token", "overhead after the last token"),
        *(f"processor time per token, {role}" for role in (*roles, "client")),
        "load generator's share of a core",
    )
    return {
        *(f"TTFT, {n} prompt tokens, {protocol}" for n in prompts for protocol in ("gRPC", "HTTP")),
        *(f"{name}, batch {b}" for name in of_batch for b in batches),
        "compilations while serving",
        *(f"peak memory, {role}" for role in roles),
    }


@pytest.mark.slow
@pytest.mark.xdist_group("cluster")
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
        (together,) = (sum(one.samples) for one in report.measurements if one.name == f"{TOLD_TOGETHER}, batch 2")
        gaps = MINIATURE.completion_tokens - 1
        assert by_name["TTFT, 20 prompt tokens, HTTP"] == MINIATURE.rounds * MINIATURE.repeats
        assert by_name["TPOT, batch 2"] == MINIATURE.rounds * MINIATURE.repeats * 2
        assert by_name["ITL, batch 2"] == by_name["TPOT, batch 2"] * gaps - together

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
        assert written["config"]["decode.max_slots"] == "4"
        assert written["machine"]["cores"] >= 1
        assert written["versions"]["jax"]


@pytest.mark.slow
@pytest.mark.xdist_group("cluster")
class TestMiniatureDisaggregated:
    def test_the_twin_of_the_whole_stack_has_every_figure_of_it(self, disaggregated: Report):
        found = {one.name for one in disaggregated.measurements if one.level == "disaggregated"}
        assert found == served_names(("gateway", "prefill", "decode"))
        assert [one for one in disaggregated.measurements if not all(map(_is_plausible(one), one.samples))] == []

    def test_nothing_is_compiled_while_serving(self, disaggregated: Report):
        (compiled,) = (one for one in disaggregated.measurements if one.name == "compilations while serving")
        assert compiled.samples == (0.0,)

    def test_each_part_with_processes_of_its_own_has_its_table(self, apart: Report):
        titles = [grid.title for grid in grids(apart)]
        assert (
            len(titles) == len(set(titles)) == len(APART) - 3 + len(MESH_GRIDS) + NUM_ROUTER_GRIDS + NUM_RECORDING_GRIDS
        )
        assert [one for one in apart.measurements if not all(map(_is_plausible(one), one.samples))] == []

    def test_every_figure_of_theirs_is_present(self, apart: Report):
        names = {level: {one.name for one in apart.measurements if one.level == level} for level in APART}
        parts = (*handoff.PARTS, handoff.SHARE)
        assert names["handoff"] == {f"{part}, {n} prompt tokens" for part in parts for n in MINIATURE.handoff_tokens}
        both = {
            f"{what}, {how}" for what in arrangements.QUANTITIES for how in (arrangements.APART, arrangements.TOGETHER)
        }
        without = {f"handoff gap, streams, {arrangements.TOGETHER}"}
        assert names["arrangements"] == (both | {arrangements.EVERY}) - without
        assert names["recording"] == {
            f"{what}, {way}"
            for what in (recording_cost.TOKENS, recording_cost.PROCESSOR)
            for way in (recording_cost.OFF, recording_cost.RECORDING, recording_cost.SPANS)
        } | {name for what in row_cost.TABLES for name in (what, row_cost.by_token(what))}
        assert names["failover"] == set(failover.UNITS)
        assert len(names["transports"]) == 5
        by_mesh = [name for name in names["meshes"] if name.startswith(handoff.SHARE)]
        assert len(by_mesh) == len(MESH_PAIRS) * len(MINIATURE.mesh_handoff_tokens)

    def test_the_first_request_of_each_length_does_not_count(self, apart: Report):
        samples = {len(one.samples) for one in apart.measurements if one.level == "handoff"}
        assert samples == {MINIATURE.handoff_repeats}

    def test_streams_that_lose_their_worker_all_end_well(self, apart: Report):
        (failed,) = (one for one in apart.measurements if one.name == failover.FAILED)
        assert failed.samples == (0.0,) * MINIATURE.kills


def _is_plausible(one: Measurement):
    def check(sample: float) -> bool:
        if not math.isfinite(sample) or abs(sample) > 1e7:
            return False
        if one.unit == "share" and sample > 1.5:
            return False
        return one.name.startswith(MAY_BE_NEGATIVE) or sample > 0 or (sample == 0 and one.name.startswith(MAY_BE_ZERO))

    return check
