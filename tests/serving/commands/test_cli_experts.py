"""`moonshard experts`, as a user runs it: a file for the key `decode.expert_loads`, a table, and named faults."""

import json
from pathlib import Path

import pytest

from moonshard.models.experts.loads import read_loads
from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.serving.cli import main
from tests.agreement import FIXTURES

pytestmark = pytest.mark.xdist_group("jax")
FOLDER = FIXTURES / "kimi_k2"


def run(folder: Path, *arguments: str) -> int:
    paths = ("--model", str(FOLDER), "--text", str(folder / "text.txt"), "--out", str(folder / "loads.json"))
    return main(["experts", *paths, *arguments])


def test_the_file_is_what_a_worker_reads_and_the_table_shows_what_placing_gains(tmp_path: Path, capsys):
    (tmp_path / "text.txt").write_text("The desk of Ada Lovelace is A1. " * 40)
    assert run(tmp_path, "--devices", "4", "--redundant", "8") == 0
    loads = read_loads(tmp_path / "loads.json", Checkpoint.open(FOLDER).fingerprint, (3, 16))
    assert len(set(loads.sum(axis=1))) == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    for _, expert, device, placed in rows:
        assert 1 <= float(placed) <= float(device) <= float(expert)


@pytest.mark.parametrize(
    ("arguments", "text", "said"),
    [
        (("--devices", "0"), "text", "--devices 0: does not divide 16 experts"),
        (("--devices", "3"), "text", "--devices 3: does not divide 16 experts"),
        (("--devices", "4", "--redundant", "2"), "text", "--redundant 2: 4 devices cannot share them equally"),
        ((), "", "text.txt: the file is empty"),
    ],
)
def test_what_cannot_be_meant_is_named_before_anything_is_measured(
    tmp_path: Path, capsys, arguments: tuple[str, ...], text: str, said: str
):
    (tmp_path / "text.txt").write_text(text)
    assert run(tmp_path, *arguments) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "loads.json").exists()


def test_a_text_that_is_not_there_is_named(tmp_path: Path, capsys):
    assert run(tmp_path) == 2
    assert "text.txt" in capsys.readouterr().err


def test_the_file_says_which_checkpoint_it_is_of(tmp_path: Path):
    (tmp_path / "text.txt").write_text("Ada.")
    assert run(tmp_path) == 0
    assert json.loads((tmp_path / "loads.json").read_text())["fingerprint"] == Checkpoint.open(FOLDER).fingerprint
