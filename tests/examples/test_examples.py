"""The notebooks that a newcomer runs first, from nothing to their last picture."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat
import pytest

from moonshard.experiments.reading.tables.run_tables import load_runs

EXAMPLES = Path(__file__).parents[2] / "examples"
FEW: dict[str, Sequence[str]] = {
    "1_one_request": (),
    "2_replay_a_trace": ("NUM_REQUESTS = 6",),
    "3_compare_two_runs": ("NUM_REQUESTS = 4", "NUM_REPEATS = 1"),
}

SLOW = pytest.mark.slow  # half a minute each

pytestmark = pytest.mark.xdist_group("cluster")


def test_every_example_is_executed_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(FEW)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["1_one_request", *(pytest.param(name, marks=SLOW) for name in sorted(FEW)[1:])])
def test_an_example_runs_from_a_folder_of_its_own(name: str, tmp_path: Path):
    sets = [part for setting in FEW[name] for part in ("--set", setting)]
    argv = [sys.executable, "-m", "moonshard.experiments.reading.notebooks", EXAMPLES / f"{name}.py", "--out", tmp_path]
    done = subprocess.run([*argv, *sets], cwd=tmp_path, env=_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    notebook = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any("&hellip;" in output.get("data", {}).get("text/html", "") for output in outputs)  # no table is cut
    assert str(tmp_path) not in nbformat.writes(notebook)
    if name == "2_replay_a_trace":
        check_replay(tmp_path / "results" / "replay")


def check_replay(runs: Path) -> None:
    """All of the trace was answered, and what its prompts have in common was found again."""
    (run,) = runs.iterdir()
    requests = load_runs(run).requests
    assert requests["outcome"].to_list() == ["completed"] * 6
    assert (requests["prompt_tokens"] == requests["planned_prompt_tokens"]).all()
    assert requests["cached_tokens"].to_numpy().sum() > 0


def _environment() -> dict[str, str]:
    """With whole paths, since the notebook runs elsewhere."""
    paths = [str(Path(path).absolute()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
