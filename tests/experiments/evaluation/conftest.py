"""A folder that every test of the evaluation may ask."""

from pathlib import Path

import pytest

from tests.experiments.evaluation.random_pocket import write_random_pocket


@pytest.fixture(scope="session")
def pocket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_pocket(tmp_path_factory.mktemp("random") / "pocket")
