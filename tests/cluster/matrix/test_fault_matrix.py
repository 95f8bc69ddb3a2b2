"""Every fault befalls every process under load: noticed in time, no token lost or wrong, no block left behind."""

import importlib.util
import itertools
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from tests.cluster.matrix.cell import Cell
from tests.cluster.matrix.command import MODULE
from tests.cluster.matrix.deployments.arrangement import ARRANGEMENTS, ROWS
from tests.cluster.matrix.faults import FAULTS
from tests.cluster.matrix.table import as_table, by_place, faults_of
from tests.cluster.pods.sandbox import why_not

pytestmark = [pytest.mark.alone, pytest.mark.xdist_group("cluster"), pytest.mark.timeout(3600)]


@pytest.fixture(scope="module", params=list(ARRANGEMENTS))
def arrangement(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def cells(arrangement: str, tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, str], Cell]:
    if reason := why_not():
        pytest.skip(reason)
    if arrangement == "ray" and importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: `make ray` does it")
    folder: Path = tmp_path_factory.mktemp("matrix")
    out = folder / "cells"
    command = [sys.executable, "-m", MODULE, arrangement, str(out), "--log", str(folder / "log")]
    subprocess.run(command, check=True)
    return by_place(msgspec.json.decode(line, type=Cell) for line in out.read_text().splitlines())


def test_what_befalls_a_process_costs_nobody_a_token(
    arrangement: str, cells: Mapping[tuple[str, str], Cell], capsys: pytest.CaptureFixture[str]
):
    with capsys.disabled():
        print(f"\n{as_table(cells.values())}")  # noqa: T201
    rows = [row for row, measured_on in ROWS.items() if measured_on == arrangement]
    assert cells.keys() == set(itertools.product(rows, FAULTS))
    assert not {place: found for place, cell in cells.items() if (found := faults_of(cell))}
