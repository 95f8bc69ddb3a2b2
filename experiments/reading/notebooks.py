"""`python -m moonshard.experiments.reading.notebooks`: scripts with cells (jupytext's percent format) as notebooks.

Each is executed in a kernel of its own and written with what its cells gave, fit to be committed: no cell tells where
on this machine anything lies, and the same run gives the same cells. Needs the extra `notebooks`.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jupytext
import nbformat
import tyro
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from moonshard.experiments.common.machine import ROOT

PERCENT = "py:percent"
PARAMETERS = "parameters"  # the tag of the cell whose values may be changed from outside
TIMEOUT_S = 600
PICTURES = frozenset({"image/png", "image/jpeg"})  # of an output: no text


def render(
    scripts: Annotated[tuple[Path, ...], tyro.conf.Positional] = (),
    run: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None,
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None,
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=VALUE")] = (),
) -> int:
    """Execute notebooks and write them with their pictures.

    Args:
        scripts: which ones; by default analysis.py of each study that has a run under results/.
        run: of which run, results/NAME/STAMP; by default the newest of each study.
        out: where notebooks and pictures go; by default beside each script.
        set: a value of the cell tagged `parameters`, in Python. May be repeated.
    """
    environment = dict(os.environ)
    if run is not None:
        environment["MOONSHARD_RUN"] = str(run.absolute())
    for script in scripts or studies_with_a_run(ROOT):
        folder = (out or script.parent).absolute()
        environment["MOONSHARD_PICTURES"] = str(folder)
        try:
            notebook = executed(script, environment, set, folder=Path.cwd())
        except CellExecutionError as error:
            print(f"{script}: {error}", file=sys.stderr)
            return 1
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / script.with_suffix(".ipynb").name
        nbformat.write(cleaned(notebook, machine_paths(environment)), path)
        print(path)
    return 0


def studies_with_a_run(root: Path) -> list[Path]:
    found = sorted((root / "experiments" / "studies").glob("*/analysis.py"))
    return [script for script in found if any((root / "results" / script.parent.name).glob("*/run.json"))]


def executed(
    script: Path, environment: Mapping[str, str], settings: Sequence[str], *, folder: Path, timeout_s: int = TIMEOUT_S
) -> NotebookNode:
    """The notebook with its results; `folder` is its working directory. CellExecutionError with a failed cell."""
    notebook = with_parameters(jupytext.read(script, fmt=PERCENT), settings)
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=timeout_s, kernel_name="python3", resources=resources)
    client.create_kernel_manager().transport = "ipc"  # no port that others could reach
    client.execute(env=dict(environment))
    return notebook


def with_parameters(notebook: NotebookNode, settings: Sequence[str]) -> NotebookNode:
    """The notebook with each `NAME=VALUE` set after the cell tagged `parameters`. ValueError where there is none."""
    if not settings:
        return notebook
    for index, cell in enumerate(notebook.cells):
        if PARAMETERS in cell.metadata.get("tags", ()):
            notebook.cells.insert(index + 1, nbformat.v4.new_code_cell("\n".join(settings)))
            return notebook
    raise ValueError(f"no cell is tagged {PARAMETERS}")


def machine_paths(environment: Mapping[str, str]) -> list[str]:
    """Paths that tell where things lie on this machine, the longest first."""
    given = [environment[name] for name in ("MOONSHARD_RUN", "MOONSHARD_PICTURES") if name in environment]
    runs = [str(Path(path).parent) for path in given]
    return sorted({str(ROOT), str(Path.cwd()), str(Path.home()), *runs} - {"/"}, key=len, reverse=True)


def cleaned(notebook: NotebookNode, paths: Sequence[str]) -> NotebookNode:
    """The notebook without times, random names and paths of this machine."""
    notebook.metadata.pop("language_info", None)
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index}"
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [_without(output, paths) for output in cell.outputs]
    return notebook


def _without(value: Any, paths: Sequence[str]) -> Any:
    """Paths below one of these are shown relative to it."""
    if isinstance(value, str):
        for path in paths:
            value = value.replace(f"{path}/", "").replace(path, ".")
        return value
    if isinstance(value, dict):
        told = {key: one if key in PICTURES else _without(one, paths) for key, one in value.items()}
        return nbformat.from_dict(told)
    return [_without(one, paths) for one in value] if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(tyro.cli(render))
