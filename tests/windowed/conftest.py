"""The windowed model as a family of the registry, for as long as a test lasts, and its reference."""

from pathlib import Path

import pytest

from moonshard.models import registry
from tests.windowed.folder import LAYER_TYPES, write_folder
from tests.windowed.model import MODEL_TYPE, SLIDING, windowed
from tests.windowed.reference import Reference


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("windowed"))


@pytest.fixture(scope="session")
def written_sliding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("sliding"), [SLIDING] * len(LAYER_TYPES))


@pytest.fixture
def folder(written: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model's folder, which can be opened."""
    monkeypatch.setitem(registry.FAMILIES, MODEL_TYPE, windowed)
    return written


@pytest.fixture
def sliding_folder(written_sliding: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder whose every layer has the window."""
    monkeypatch.setitem(registry.FAMILIES, MODEL_TYPE, windowed)
    return written_sliding


@pytest.fixture(scope="session")
def reference(written: Path) -> Reference:
    return Reference(written)
