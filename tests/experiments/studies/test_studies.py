"""Every study in miniature: its sweep on real processes, and its notebook on what came of it."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import nbformat
import polars as pl
import pytest

from moonshard.experiments.reading.child import run_experiment
from moonshard.experiments.reading.step_model import StepModel, StepTimes
from moonshard.experiments.reading.tables.frames import load_run
from moonshard.experiments.reading.tables.run_tables import load_runs
from moonshard.experiments.runner.experiment import load_experiment
from moonshard.experiments.studies.affinity.figures import figures
from moonshard.experiments.studies.affinity.recorded import rounds_of
from moonshard.experiments.studies.tiers.recorded import rounds_of as tiers_rounds_of
from tests.sizes import BLOCK_SIZE, CHUNK_TOKENS, IN_EXPERIMENT, NUM_BLOCKS

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "tests" / "fixtures" / "kimi_k2"
CHUNK, KV = f"server.prefill.chunk_tokens={CHUNK_TOKENS}", tuple(p for p in IN_EXPERIMENT if p.startswith("server.kv."))


def small(*swept: str) -> tuple[str, ...]:
    """The sizes of all tests but those that the study's points set themselves, which leaves little to compile."""
    own = (part for part in IN_EXPERIMENT if part not in swept)
    quick = ("cores=[]", "repeats=1", "warmup_requests=1", "server.worker.prepare=needed")
    return (*quick, f'server.model.path="{MODEL}"', *own)


MIXED = ("workload.prompt_tokens=[40, 20]", "workload.output_tokens=[4, 24]", "workload.num_requests=8")
# What makes seconds of each study, and the pictures that its notebook leaves.
MINIATURES: Mapping[str, tuple[Sequence[str], set[str]]] = {
    "pd_vs_aggregated": (
        (
            *(*small(CHUNK), *MIXED, "sweep.workload.rate_per_s=[20]"),
            f"points=[{{server.mode='disaggregated', {CHUNK}}}, {{server.mode='aggregated', {CHUNK}}}]",
        ),
        {"over_load", "itl", "itl_over_time", "steps"},
    ),
    "transfer": (
        (
            *(*small(CHUNK, *KV), "workload.num_requests=4", "sweep.workload.prompt_tokens=[40]"),
            f"points=[{{server.kv={{transport='mooncake', block_size={BLOCK_SIZE}, num_blocks={NUM_BLOCKS}, "
            f"slab_bytes=1048576}}, {CHUNK}}}]",
        ),
        {"exposed", "one_request", "steps"},
    ),
    "ratio": (
        (
            *small(),
            *("workload.num_requests=8", "workload.num_clients=1"),
            "points=[{server.prefill.replicas=1, server.decode.replicas=1, "
            "workload.prompt_tokens=40, workload.output_tokens=8}]",
        ),
        {"splits", "steps"},
    ),
    "chunking": (
        (
            *(*small(CHUNK), *MIXED, "workload.rate_per_s=20"),
            *("workload.prompt_tokens=[80, 20]", "sweep.server.prefill.chunk_tokens=[32, 64]"),
        ),
        {"itl", "itl_over_time", "steps"},
    ),
    "overload": (
        (
            *small(),
            *("workload.prompt_tokens=40", "workload.output_tokens=8"),
            "points=[{workload={kind='fixed', num_clients=2, num_requests=10}}, "
            "{workload={kind='relative', times_capacity=3.0, lasts_s=0.3}}]",
        ),
        {"good_requests", "refusals", "steps"},
    ),
    "affinity": (
        (
            *("cores=[]", "repeats=1", "server.prefill.replicas=2"),
            # sizes of the cluster that the embedded model's answers are asked of, which leaves its programs compiled
            *("server.model.max_context_tokens=4096", "server.kv.num_blocks=320", "server.kv.block_size=64"),
            *("server.prefill.chunk_tokens=64", "server.prefill.max_slots=4", "server.decode.max_slots=4"),
            *("workload.num_sessions=3", "workload.session_tokens=400", "workload.num_clients=1"),
            *("workload.mean_think_s=0.01", "workload.max_tokens=64"),
        ),
        {"affinity", "steps"},
    ),
    "tiers": (
        (
            *("repeats=1", "server.kv.num_blocks=16", "server.kv.block_size=64", "server.prefill.chunk_tokens=64"),
            *(
                "server.decode.max_slots=4",
                "server.model.max_context_tokens=1024",
                "workload.num_sessions=3",
                "workload.session_tokens=400",
            ),
            *("workload.num_clients=3", "workload.mean_think_s=0.01", "workload.max_tokens=4"),
        ),
        {"ttft", "steps"},
    ),
}

WITH_SESSIONS = ("affinity", "tiers")

# Each takes ten seconds and more: these two have both modes and a sweep between them.
QUICK = ("pd_vs_aggregated",)


def a_study(name: str):
    return pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)


# What a study's notebook says in words, of a miniature too.
TOLD: Mapping[str, Sequence[str]] = {
    "pd_vs_aggregated": ("SLO lost", "of the disaggregated arm", "exposed_transfer_ms"),
    "ratio": ("tied with", "predicted best", "prefill, s a request"),
    "chunking": ("tied with",),
    "overload": ("takes everything: at 3 times the capacity", "refuses beyond 1.0 s: at 3 times the capacity"),
}
STEPS_TAKE = StepTimes(fixed_ms=1.0, row_us=20.0, pair_ns=1.0)

pytestmark = pytest.mark.xdist_group("cluster")


def rendered(script: Path, out: Path, run: Path, *settings: str) -> nbformat.NotebookNode:
    argv = [sys.executable, "-m", "moonshard.experiments.reading.notebooks", script, "--run", run, "--out", out]
    argv += [part for setting in settings for part in ("--set", setting)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    return nbformat.read(out / script.with_suffix(".ipynb").name, as_version=4)


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A study's miniature, run once."""

    @cache
    def run(name: str) -> Path:
        settings, _ = MINIATURES[name]
        return run_experiment(ROOT / "experiments" / "studies" / name, *settings, out=tmp_path_factory.mktemp(name))

    return run


def test_every_study_has_a_miniature():
    studies = {path.parent.name for path in (ROOT / "experiments" / "studies").glob("*/config.toml")}
    assert studies == set(MINIATURES)
    for name in studies:
        folder = ROOT / "experiments" / "studies" / name
        assert {path.name for path in folder.iterdir()} >= {"config.toml", "README.md", "analysis.py"}


@pytest.mark.parametrize("name", MINIATURES)
def test_a_study_and_its_miniature_can_be_read_and_its_script_compiles(name: str):
    folder = ROOT / "experiments" / "studies" / name
    assert len(load_experiment(folder).points) > 1
    assert load_experiment(folder, MINIATURES[name][0]).points
    compile((folder / "analysis.py").read_text(), "analysis.py", "exec")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [a_study(name) for name in MINIATURES])
def test_a_study_runs_and_its_notebook_makes_its_pictures(name: str, run_of: Callable[[str], Path], tmp_path: Path):
    run = run_of(name)
    record = load_run(run).record
    assert record.state == "done"
    (tmp_path / "step_times.json").write_text(StepModel(prefill=STEPS_TAKE, decode=STEPS_TAKE).to_json())
    settings = (f"STEP_TIMES = {str(tmp_path / 'step_times.json')!r}",) if name == "ratio" else ()
    notebook = rendered(ROOT / "experiments" / "studies" / name / "analysis.py", tmp_path / "pictures", run, *settings)
    assert {path.stem for path in (tmp_path / "pictures").glob("*.png")} == MINIATURES[name][1]
    told = str([cell.outputs for cell in notebook.cells if cell.cell_type == "code"])
    assert "&hellip;" not in told  # every table is shown whole
    assert all(one in told for one in TOLD.get(name, ()))
    assert str(tmp_path) not in told
    assert str(run.parent) not in told
    assert str(ROOT) not in told
    assert "No times of steps are kept of this run: workers had no cores of their own" in told  # a miniature pins none


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [a_study(name) for name in MINIATURES if name not in WITH_SESSIONS])
def test_every_request_of_a_miniature_is_answered_as_its_workload_says(name: str, run_of: Callable[[str], Path]):
    requests = load_runs(run_of(name)).requests
    assert set(requests["outcome"]) == {"completed"}
    assert (requests["completion_tokens"] == requests["max_tokens"]).all()
    assert (requests["prompt_tokens"] == requests["planned_prompt_tokens"]).all()
    assert set(requests["cached_tokens"]) == {0}


@pytest.mark.timeout(600)
def test_disaggregated_every_request_is_handed_over_and_aggregated_none(run_of: Callable[[str], Path]):
    requests = load_runs(run_of("pd_vs_aggregated")).requests
    gaps = requests.group_by("server.mode").agg(pl.col("handoff_gap_ms").count().alias("num")).sort("server.mode")
    assert gaps.rows() == [("aggregated", 0), ("disaggregated", 8)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_exposed_of_a_transfer_is_no_more_than_the_transfer(run_of: Callable[[str], Path]):
    moved = load_runs(run_of("transfer")).server_requests
    assert moved["transfer_ms"].count() == moved.height == 4
    assert (moved["exposed_transfer_ms"] <= moved["transfer_ms"]).all()
    assert (moved["exposed_transfer_ms"] >= 0).all()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_both_pools_of_a_split_have_worked(run_of: Callable[[str], Path]):
    steps = load_runs(run_of("ratio")).steps.filter(pl.col("kind").is_in(["prefill", "decode"]))
    tokens = dict(steps.group_by("role", "kind").agg(pl.col("tokens").sum()).select("role", "tokens").iter_rows())
    assert tokens == {"prefill": 8 * 40, "decode": 8 * 7}  # the first token comes of the prefill


@pytest.mark.slow  # that the scheduler keeps to it is held by its own tests; this is of the study's table
@pytest.mark.timeout(600)
def test_no_chunk_is_larger_than_it_says(run_of: Callable[[str], Path]):
    steps = load_runs(run_of("chunking")).steps.filter(pl.col("kind") == "prefill")
    found = steps.group_by("server.prefill.chunk_tokens").agg(pl.col("tokens").max()).sort("tokens")
    assert found.rows() == [(32, 32), (64, 64)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_loads_are_multiples_of_what_the_closed_loop_of_the_run_got_done(run_of: Callable[[str], Path]):
    run = load_run(run_of("overload"))
    first = run.trials[0, 0].record
    capacity_per_s = first.num_sent / first.wall_s
    assert run.record.points[0].swept["server.routing.ttft_slo_s"] == 600
    loads = [(point, point.swept.get("workload.times_capacity")) for point in run.record.points]
    assert [load for _, load in loads] == [None, None, 3.0, 3.0]
    for point, _ in loads[2:]:
        sent = run.trials[point.number, 0].record.workload
        assert sent["rate_per_s"] == pytest.approx(3 * capacity_per_s)
        assert sent["num_requests"] == max(1, round(3 * capacity_per_s * 0.3))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nobody_finds_more_in_tiers_than_one_unbounded_cache_would(run_of: Callable[[str], Path]):
    rounds = tiers_rounds_of(load_runs(run_of("tiers")))
    assert [one.arm for one in rounds] == ["device", "host", "store", "ssd", "all"]
    for one in rounds:
        assert all(turn.cached_tokens <= turn.oracle_tokens for turn in one.turns)
        assert one.tier_tokens <= sum(turn.cached_tokens for turn in one.turns)
    assert rounds[0].tier_tokens == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_prefixes_are_found_again_at_most_as_one_unbounded_cache_would(run_of: Callable[[str], Path]):
    """What was computed is what no cache had, nobody finds more than the oracle, and pinned later turns find as much.

    By `cost` they may find less: these think for less than a tick, which is how old a load may be that it goes by.
    """
    rounds = rounds_of(load_runs(run_of("affinity")))
    assert [one.arm for one in rounds] == ["random", "header", "cost", "dropped", "kept"]
    for one in rounds:
        assert len(one.computed_tokens) == 2
        computed = sum(turn.prompt_tokens - turn.cached_tokens for turn in one.turns)
        assert sum(one.computed_tokens.values()) == computed
        assert all(0 <= turn.cached_tokens < turn.prompt_tokens for turn in one.turns)
        assert all(turn.cached_tokens <= turn.oracle_tokens for turn in one.turns)
    pinned = next(one for one in rounds if one.arm == "header")
    later = [turn for turn in pinned.turns if turn.index > 0]
    assert later
    assert all(turn.cached_tokens == turn.oracle_tokens for turn in later)
    assert figures("cost", rounds).hit_rate > 0
    assert figures("header", rounds).hit_rate > 0.3
