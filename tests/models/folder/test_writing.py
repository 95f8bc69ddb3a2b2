"""A folder is written piece by piece: one is in memory at a time, and what was cut short does not open."""

import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moonshard.models.folder.checkpoint import Checkpoint, CheckpointError
from moonshard.models.folder.writing import Piece, Planned, write_pieces

SHAPE = (8, 4)


def piece(name: str, make: Callable[[str], np.ndarray]) -> Piece:
    """A matrix and a vector of other types, so that they do not lie beside each other in the file."""
    planned = {f"{name}.codes": Planned(dtype="I8", shape=SHAPE), f"{name}.scales": Planned(dtype="F32", shape=(8,))}
    return Piece(
        tensors=planned, make=lambda: {f"{name}.codes": make(name), f"{name}.scales": np.full(8, ord(name), np.float32)}
    )


def filled(name: str) -> np.ndarray:
    return np.full(SHAPE, ord(name), np.int8)


@pytest.mark.parametrize("max_shard_bytes", [1, 150, 1 << 20])
def test_each_tensor_lies_where_the_header_says_whatever_is_made_with_it(tmp_path: Path, max_shard_bytes: int):
    write_pieces(tmp_path, {}, [piece(name, filled) for name in "abc"], max_shard_bytes=max_shard_bytes)
    checkpoint = Checkpoint.open(tmp_path)
    for name in "abc":
        np.testing.assert_array_equal(checkpoint.tensor(f"{name}.codes"), filled(name))
        np.testing.assert_array_equal(checkpoint.tensor(f"{name}.scales"), np.full(8, ord(name), np.float32))
        assert checkpoint.tensor(f"{name}.scales").flags.aligned


def test_one_piece_is_in_memory_at_a_time(tmp_path: Path):
    made = list[weakref.ref[np.ndarray]]()

    def make(name: str) -> np.ndarray:
        assert all(reference() is None for reference in made)
        array = filled(name)
        made.append(weakref.ref(array))
        return array

    write_pieces(tmp_path, {}, [piece(name, make) for name in "abcd"])
    assert len(made) == 4


@pytest.mark.parametrize("max_shard_bytes", [1, 1 << 20])
@pytest.mark.parametrize("last", "abc")
def test_a_folder_whose_writing_was_cut_short_does_not_open(tmp_path: Path, max_shard_bytes: int, last: str):
    def make(name: str) -> np.ndarray:
        if name == last:
            raise KeyboardInterrupt
        return filled(name)

    with pytest.raises(KeyboardInterrupt):
        write_pieces(tmp_path, {}, [piece(name, make) for name in "abc"], max_shard_bytes=max_shard_bytes)
    with pytest.raises(CheckpointError):
        Checkpoint.open(tmp_path)


def test_a_tensor_of_another_size_than_planned_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"tensor 'a\.codes' has 3 bytes, not 32"):
        write_pieces(tmp_path, {}, [piece("a", lambda name: np.zeros(3, np.int8))])


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/file"):
        write_pieces(tmp_path / "file" / "folder", {}, [piece("a", filled)])
