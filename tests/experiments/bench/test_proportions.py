"""The folder with Kimi K2's proportions is one that a worker would load, and is never written over another."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from moonshard.experiments.bench.peers import proportions
from moonshard.models import weights
from moonshard.models.registry import open_model

COMMAND = (sys.executable, "-m", "moonshard.experiments.bench.peers.proportions")


@pytest.mark.slow
def test_the_folder_is_a_whole_model_and_is_not_written_over(tmp_path: Path):
    subprocess.run((*COMMAND, tmp_path), check=True, timeout=120)
    checkpoint, model = open_model(tmp_path)
    config = model.config
    weights.check_shapes(model.declare(), checkpoint)
    assert (config.hidden_size, config.num_hidden_layers, config.n_routed_experts) == (512, 8, 32)
    again = subprocess.run((*COMMAND, tmp_path), check=False, capture_output=True, text=True, timeout=120)
    assert again.returncode == 1
    assert "the folder already holds weights" in again.stderr


def test_it_has_as_many_parameters_as_it_says():
    assert sum(math.prod(shape) for _, shape in proportions.shapes()) == pytest.approx(113.5e6, rel=1e-3)


def test_a_folder_that_could_not_be_finished_is_not_there(tmp_path: Path, monkeypatch):
    def half(folder: Path) -> None:
        folder.mkdir()
        raise OSError("no space left")

    monkeypatch.setattr(proportions, "write", half)
    with pytest.raises(OSError, match="no space"):
        proportions.once(tmp_path / "deep" / "model")
    assert not list((tmp_path / "deep").iterdir())
    monkeypatch.setattr(proportions, "write", lambda folder: folder.mkdir())
    assert proportions.once(tmp_path / "deep" / "model").is_dir()
    monkeypatch.setattr(proportions, "write", half)
    assert proportions.once(tmp_path / "deep" / "model").is_dir()
