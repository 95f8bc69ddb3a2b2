"""Folders that are made where they are not there yet."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """The folder, made by `make` first where it is not there: whole, or not at all. OSError where that cannot be."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent) as unfinished:
            make(Path(unfinished) / folder.name)
            (Path(unfinished) / folder.name).rename(folder)
    return folder
