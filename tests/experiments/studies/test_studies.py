"""Every study in miniature: its sweep on real processes, and its notebook on what came of it."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import nbformat
import pytest

from moonshard.experiments.affinity.figures import figures
from moonshard.experiments.affinity.recorded import rounds_of
from moonshard.experiments.lab.child import run_experiment
from moonshard.experiments.lab.frames import load_run
from moonshard.experiments.lab.run_tables import load

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "tests" / "fixtures" / "kimi_k2"
SMALL = (
    *("cores=[]", "repeats=1", "warmup_requests=1", f'server.model.path="{MODEL}"'),
    *("server.model.max_context_tokens=128", "server.kv.num_blocks=64", "server.decode.max_slots=2"),
)
MIXED = ("workload.prompt_tokens=[40, 20]", "workload.output_tokens=[4, 24]", "workload.num_requests=8")
# What makes seconds of each study, and the pictures that its notebook leaves.
MINIATURES: Mapping[str, tuple[Sequence[str], set[str]]] = {
    "pd_vs_aggregated": (
        (
            *(*SMALL, *MIXED, "server.kv.block_size=16", "sweep.workload.rate_per_s=[20]"),
            "points=[{server.mode='disaggregated', server.prefill.chunk_tokens=32}, "
            "{server.mode='aggregated', server.prefill.chunk_tokens=32}]",
        ),
        {"over_load", "gaps", "gaps_over_time", "steps"},
    ),
    "transfer": (
        (
            *(*SMALL, "workload.num_requests=4", "sweep.workload.prompt_tokens=[40]"),
            "points=[{server.kv={transport='mooncake', block_size=16, slab_bytes=1048576}, "
            "server.prefill.chunk_tokens=32}]",
        ),
        {"exposed", "one_request", "steps"},
    ),
    "ratio": (
        (
            *(*SMALL, "server.kv.block_size=16", "server.prefill.chunk_tokens=32"),
            *("workload.num_requests=8", "workload.num_clients=2"),
            "points=[{server.prefill.replicas=1, server.decode.replicas=1, "
            "workload.prompt_tokens=40, workload.output_tokens=8}]",
        ),
        {"splits", "steps"},
    ),
    "chunking": (
        (
            *(*SMALL, *MIXED, "server.kv.block_size=16", "workload.rate_per_s=20"),
            "sweep.server.prefill.chunk_tokens=[16, 32]",
        ),
        {"jitter", "gaps_over_time", "steps"},
    ),
    "overload": (
        (
            *(*SMALL, "server.kv.block_size=16", "server.prefill.chunk_tokens=32"),
            *("workload.prompt_tokens=40", "workload.output_tokens=8", "sweep.server.routing.ttft_slo_s=[1.0]"),
            "points=[{workload.rate_per_s=20, workload.num_requests=10}]",
        ),
        {"goodput", "refusals", "steps"},
    ),
    "affinity": (
        (
            *("cores=[]", "repeats=1", "server.model.max_context_tokens=1024", "server.kv.num_blocks=64"),
            *("server.prefill.replicas=2", "server.prefill.chunk_tokens=256", "server.decode.max_slots=4"),
            *("workload.num_sessions=3", "workload.session_tokens=400", "workload.num_clients=2"),
            "workload.mean_think_s=0.01",
        ),
        {"affinity", "steps"},
    ),
}

pytestmark = pytest.mark.xdist_group("cluster")


def rendered(script: Path, out: Path, run: Path) -> nbformat.NotebookNode:
    argv = [sys.executable, "-m", "moonshard.experiments.lab.notebooks", script, "--run", run, "--out", out]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    return nbformat.read(out / script.with_suffix(".ipynb").name, as_version=4)


def check_affinity(run: Path) -> None:
    """What was computed is what no cache had, nobody finds more than the oracle, and `cost` finds as much."""
    rounds = rounds_of(load(run))
    assert [one.arm for one in rounds] == ["random", "header", "cost"]
    for one in rounds:
        assert len(one.computed_tokens) == 2
        computed = sum(turn.prompt_tokens - turn.cached_tokens for turn in one.turns)
        assert sum(one.computed_tokens.values()) == computed
        assert all(0 <= turn.cached_tokens <= turn.oracle_tokens for turn in one.turns)
    assert figures("cost", rounds).points_below_oracle == 0.0
    assert figures("header", rounds).hit_rate > 0.3


def test_every_study_has_a_miniature():
    studies = {path.parent.name for path in (ROOT / "experiments").glob("*/config.toml")}
    assert studies == set(MINIATURES)
    for name in studies:
        folder = ROOT / "experiments" / name
        assert {path.name for path in folder.iterdir()} >= {"config.toml", "README.md", "analysis.py"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MINIATURES)
def test_a_study_runs_and_its_notebook_makes_its_pictures(name: str, tmp_path: Path):
    settings, pictures = MINIATURES[name]
    study = ROOT / "experiments" / name
    run = run_experiment(study, *settings, out=tmp_path / "results")
    record = load_run(run).record
    assert record.state == "done"
    if name == "affinity":
        check_affinity(run)
    notebook = rendered(study / "analysis.py", tmp_path / "pictures", run)
    assert {path.stem for path in (tmp_path / "pictures").glob("*.png")} == pictures
    assert (tmp_path / "pictures" / "step_times.json").is_file()
    told = "".join(nbformat.writes(notebook))
    assert str(tmp_path) not in told
    assert str(ROOT) not in told
