"""The mean of two folders' weights: what numpy says, in the second folder, which is left alone where they differ."""

from pathlib import Path

import numpy as np
import pytest

from moonshard.experiments.training.texts.mix import mix
from moonshard.models.folder.checkpoint import Checkpoint, CheckpointError
from moonshard.models.folder.writing import write_checkpoint


def folder(path: Path, **tensors: np.ndarray) -> Path:
    write_checkpoint(path, {}, tensors)
    return path


def test_each_tensor_is_the_weighted_mean_of_both(tmp_path: Path):
    old, new = (np.arange(6, dtype=np.float32).reshape(2, 3) * factor for factor in (1, 10))
    before, after = folder(tmp_path / "before", a=old, b=old), folder(tmp_path / "after", a=new, b=old)
    mix(before, after, 0.25)
    mixed = Checkpoint.open(after)
    np.testing.assert_allclose(mixed.tensor("a"), 0.25 * old + 0.75 * new)
    np.testing.assert_allclose(mixed.tensor("b"), old)
    np.testing.assert_array_equal(Checkpoint.open(before).tensor("a"), old)


def test_folders_with_other_tensors_are_refused_and_left(tmp_path: Path):
    one = np.ones(2, np.float32)
    before, after = folder(tmp_path / "before", a=one), folder(tmp_path / "after", b=one)
    with pytest.raises(CheckpointError, match="not the same tensors"):
        mix(before, after, 0.5)
    assert list(Checkpoint.open(after).names) == ["b"]
