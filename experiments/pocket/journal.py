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

from moonshard.experiments.pocket.recipe import Recipe, RunFailed

TOLD, METRICS = "run.json", "metrics.jsonl"


class Journal:
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
    """Notes what the run is told, or compares with what it was told before. RunFailed if that was something else."""
    told = json.loads(json.dumps({"recipe": dataclasses.asdict(recipe), "shape": dict(shape)}))
    path = folder / TOLD
    if not path.exists():
        _replace(path, json.dumps(told, indent=2, sort_keys=True) + "\n")
        return
    before = json.loads(path.read_text())
    differing = [
        f"{part}.{name}"
        for part in told
        for name in {**told[part], **before.get(part, {})}
        if told[part].get(name) != before.get(part, {}).get(name)
    ]
    if differing:
        raise RunFailed(f"{path}: this run was started with another {', '.join(differing)}; give --out another folder")


def read_shape(folder: Path) -> dict[str, Any]:
    """The model's config.json, as the run was told it. RunFailed where no run is."""
    try:
        return json.loads((folder / TOLD).read_text())["shape"]
    except OSError as error:
        raise RunFailed(f"{folder / TOLD}: {error.strerror or error}") from error


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


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
