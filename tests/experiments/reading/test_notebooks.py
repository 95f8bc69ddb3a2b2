"""Notebooks as they are committed: nothing of this machine in them, and values from outside where they are meant."""

from pathlib import Path

import jupytext
import nbformat
import pytest

from moonshard.experiments.reading.notebooks import PERCENT, cleaned, studies_with_a_run, with_parameters

SCRIPT = '# %% tags=["parameters"]\nNUM = 200\n\n# %%\nNUM + 1\n'


def test_a_value_from_outside_comes_after_the_notebooks_own():
    notebook = with_parameters(jupytext.reads(SCRIPT, fmt=PERCENT), ["NUM = 5"])
    assert [cell.source for cell in notebook.cells] == ["NUM = 200", "NUM = 5", "NUM + 1"]


def test_a_notebook_that_takes_no_values_refuses_them():
    bare = jupytext.reads("# %%\n1\n", fmt=PERCENT)
    assert len(with_parameters(bare, []).cells) == 1
    with pytest.raises(ValueError, match="no cell is tagged parameters"):
        with_parameters(bare, ["NUM = 5"])


def test_no_path_time_or_name_of_this_machine_is_left():
    notebook = jupytext.reads(SCRIPT, fmt=PERCENT)
    cell = notebook.cells[0]
    cell.metadata["execution"] = {"iopub.execute_input": "2026-11-23T00:00:00Z"}
    picture = {"image/png": "/here/is/base64", "text/plain": "Path('/here/is/results/a.png')"}
    cell.outputs = [
        nbformat.v4.new_output("display_data", picture),
        nbformat.v4.new_output("stream", text="/here/is and /here/elsewhere\n"),
    ]
    done = cleaned(notebook, ["/here/is", "/here"])
    shown, said = done.cells[0].outputs
    assert shown.data == {"image/png": "/here/is/base64", "text/plain": "Path('results/a.png')"}
    assert said.text == ". and elsewhere\n"
    assert "execution" not in done.cells[0].metadata
    assert [cell.id for cell in done.cells] == ["cell-0", "cell-1"]
    nbformat.validate(done)


def test_only_studies_with_a_run_are_rendered_unasked(tmp_path: Path):
    for name in ("one", "two"):
        (tmp_path / "experiments" / "studies" / name).mkdir(parents=True)
        (tmp_path / "experiments" / "studies" / name / "analysis.py").touch()
    (tmp_path / "results" / "two" / "stamp").mkdir(parents=True)
    (tmp_path / "results" / "two" / "stamp" / "run.json").touch()
    assert studies_with_a_run(tmp_path) == [tmp_path / "experiments" / "studies" / "two" / "analysis.py"]
