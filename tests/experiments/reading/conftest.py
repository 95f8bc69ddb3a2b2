"""A made-up run, on disk and as frames."""

from pathlib import Path

import pytest

from moonshard.experiments.reading.tables.run_tables import RunTables, load_runs
from tests.experiments.reading.made_up import made_up_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="session")
def tables(run: Path) -> RunTables:
    return load_runs(run)
