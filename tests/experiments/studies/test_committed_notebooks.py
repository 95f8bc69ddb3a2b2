"""The notebooks that lie beside the studies came of the scripts that lie beside them, and say of which run."""

import re
from pathlib import Path

import jupytext
import nbformat
import pytest

from moonshard.experiments.reading.notebooks import PERCENT
from moonshard.experiments.reading.step_model import StepModel

STUDIES = Path(__file__).parents[3] / "experiments" / "studies"
NAMES = sorted(path.parent.name for path in STUDIES.glob("*/config.toml"))


def notebook_of(name: str) -> nbformat.NotebookNode:
    return nbformat.read(STUDIES / name / "analysis.ipynb", as_version=4)


def told(notebook: nbformat.NotebookNode) -> str:
    """All that its cells gave, as text."""
    return str([cell.outputs for cell in notebook.cells if cell.cell_type == "code"])


@pytest.mark.parametrize("name", NAMES)
def test_its_cells_are_those_of_the_script(name: str):
    script = jupytext.read(STUDIES / name / "analysis.py", fmt=PERCENT)
    found = [(cell.cell_type, cell.source) for cell in notebook_of(name).cells]
    assert found == [(cell.cell_type, cell.source) for cell in script.cells]


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_was_executed_in_order_and_none_failed(name: str):
    cells = [cell for cell in notebook_of(name).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)


@pytest.mark.parametrize("name", NAMES)
def test_the_readme_states_the_day_of_the_run_that_the_notebook_read(name: str):
    days = re.findall(r"\d{4}-\d{2}-\d{2}", told(notebook_of(name)))
    assert days
    assert days[0] in (STUDIES / name / "README.md").read_text()


def test_ratio_predicts_with_the_times_of_steps_that_chunking_keeps():
    model = StepModel.from_json((STUDIES / "chunking" / "step_times.json").read_bytes())
    assert f"Times of steps: {model.source}" in told(notebook_of("ratio"))
