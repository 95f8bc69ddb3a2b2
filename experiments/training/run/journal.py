"""What a run leaves beside its checkpoints: what it was told (`run.json`) and how it went (`metrics.jsonl`).

A resumed run must have been told the same, and goes on writing where its checkpoint stands: what a killed run wrote
beyond that is dropped, since it will happen again.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moonshard.experiments.training.run.recipe import Recipe, RunFailed

RUN_FOLDER = Path("results/pocket/run")  # where a run lies, unless it is told otherwise
TOLD, METRICS = "run.json", "metrics.jsonl"
RECIPE, SHAPE = "recipe", "shape"  # the parts of what a run is told


class RunJournal:
    """Appends one JSON object per line. RunFailed where the folder cannot be written."""

    def __init__(self, folder: Path, step: int):
        """Goes on after `step`: lines of later steps, and a line cut short, are dropped."""
        self._path = folder / METRICS
        kept = [line for line in _lines(self._path) if _step_of(line) <= step]
        _replace(self._path, "".join(f"{line}\n" for line in kept))

    def append(self, record: Mapping[str, Any]) -> None:
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise RunFailed(f"{self._path}: {error.strerror or error}") from error


def tell(folder: Path, recipe: Recipe, shape: Mapping[str, Any]) -> None:
    """Records the run's settings, or compares them with those recorded before.

    RunFailed if that was something else, or cannot be read or written.
    """
    told = json.loads(json.dumps({RECIPE: dataclasses.asdict(recipe), SHAPE: dict(shape)}))
    path = folder / TOLD
    if not path.exists():
        _replace(path, json.dumps(told, indent=2, sort_keys=True) + "\n")
        return
    before = _read_told(path)
    differing = [
        f"{part}.{name}"
        for part in told
        for name in {**told[part], **before[part]}
        if told[part].get(name) != before[part].get(name)
    ]
    if differing:
        raise RunFailed(f"{path}: this run was started with another {', '.join(differing)}; give --out another folder")


def read_shape(folder: Path) -> dict[str, Any]:
    """The model's config.json as recorded for the run. RunFailed where there is no run, or its file is damaged."""
    return _read_told(folder / TOLD)[SHAPE]


def read_averaged(folder: Path) -> tuple[int, ...]:
    """The steps whose weights the run's recipe averages. RunFailed as `read_shape`, or where they are no steps."""
    averaged = _read_told(folder / TOLD)[RECIPE].get("averaged", [])
    if not isinstance(averaged, list) or not all(type(step) is int and step > 0 for step in averaged):
        raise RunFailed(f"{folder / TOLD}: damaged: averaged is {averaged!r}")
    return tuple(averaged)


def _read_told(path: Path) -> dict[str, dict[str, Any]]:
    """The recorded settings, by part. RunFailed unless both parts can be read."""
    try:
        told = json.loads(path.read_text())
    except OSError as error:
        raise RunFailed(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise RunFailed(f"{path}: damaged: {error}") from error
    for part in (RECIPE, SHAPE):
        if not isinstance(told, dict) or not isinstance(told.get(part), dict):
            raise RunFailed(f"{path}: damaged: there is no {part} in it")
    return told


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines() if path.exists() else []
    except OSError as error:
        raise RunFailed(f"{path}: {error.strerror or error}") from error


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    except OSError as error:
        raise RunFailed(f"{path}: {error.strerror or error}") from error
