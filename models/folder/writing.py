"""Writes a folder that `Checkpoint.open` and transformers read, piece by piece: no more is in memory than one of them.

Sources as `checkpoint`'s. What the tensors' names mean is the caller's business.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from moonshard.models.folder.checkpoint import (
    CONFIG,
    INDEX,
    ITEM_BYTES,
    LENGTH_BYTES,
    READABLE,
    WEIGHTS,
    CheckpointError,
)

MAX_SHARD_BYTES = 5 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A tensor that will be written. `dtype` is in safetensors' spelling."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.item_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Tensors that are made at once, and lie in one file. `make` is called once, when they are written."""

    tensors: Mapping[str, Planned]
    make: Callable[[], Mapping[str, np.ndarray]]
    free: Callable[[], None] = lambda: None  # called once they are written

    @property
    def num_bytes(self) -> int:
        return sum(planned.num_bytes for planned in self.tensors.values())


def write_checkpoint(
    folder: Path | str,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a folder of tensors that are there: one file, or several with an index.

    Args:
        tensors: of the types of `READABLE`, in the order in which they fill the files.
        max_shard_bytes: tensor bytes per file; a larger tensor gets a file to itself.

    Raises CheckpointError for another dtype, for no tensors at all, and where the folder already holds weights.
    """

    def piece(name: str, array: np.ndarray) -> Piece:
        planned = Planned(dtype=_spelling(name, array), shape=array.shape)
        return Piece(tensors={name: planned}, make=lambda: {name: array})

    pieces = [piece(name, array) for name, array in tensors.items()]
    write_pieces(folder, config, pieces, max_shard_bytes=max_shard_bytes)


def write_pieces(
    folder: Path | str,
    config: Mapping[str, Any],
    pieces: Sequence[Piece],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Likewise of tensors that are made one piece after the other. A folder whose writing was cut short does not open.

    Args:
        progress: called with (pieces written, pieces in all).

    Raises:
        CheckpointError: no tensors at all, a folder that already holds weights or cannot be written. What a piece's
            `make` raises passes through.
    """
    folder = Path(folder)
    if not pieces:
        raise CheckpointError("a checkpoint without tensors")
    shards = _split(pieces, max_shard_bytes)
    files = [WEIGHTS] if len(shards) == 1 else [_shard_file(i, len(shards)) for i in range(1, len(shards) + 1)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if existing := sorted(folder.glob("model*.safetensors*")):
            raise CheckpointError(f"{existing[0]}: the folder already holds weights")
        done = 0
        for file, shard in zip(files, shards, strict=True):
            done = _write_file(folder / file, shard, lambda num: progress(num, len(pieces)), done)
        if len(shards) > 1:
            weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in _tensors(shard)}
            total_bytes = sum(piece.num_bytes for piece in pieces)
            _write_json(folder / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
        _write_json(folder / CONFIG, config)  # last
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder}: {error.strerror or error}") from error


def _spelling(name: str, array: np.ndarray) -> str:
    for spelling, dtype in READABLE.items():
        if array.dtype == dtype:
            return spelling
    raise CheckpointError(f"tensor {name!r} has dtype {array.dtype}; {', '.join(READABLE)} can be written")


def _split(pieces: Sequence[Piece], max_shard_bytes: int) -> list[list[Piece]]:
    """Pieces per file, filled in order."""
    shards: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if not shards or piece.num_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(piece)
        room -= piece.num_bytes
    return shards


def _shard_file(index: int, count: int) -> str:
    return f"model-{index:05}-of-{count:05}.safetensors"


def _tensors(shard: Iterable[Piece]) -> dict[str, Planned]:
    return {name: planned for piece in shard for name, planned in piece.tensors.items()}


def _write_file(path: Path, shard: Sequence[Piece], progress: Callable[[int], None], done: int) -> int:
    """Writes each piece's tensors where they belong; how many pieces are written then."""
    # Wide elements first: with the header padded to 8 bytes, every tensor is then aligned to its element.
    ordered = dict(sorted(_tensors(shard).items(), key=lambda item: -item[1].item_bytes))
    fields = _header(ordered)
    header = json.dumps(fields, separators=(",", ":")).encode()
    header += b" " * (-len(header) % LENGTH_BYTES)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(LENGTH_BYTES, "little"))
        file.write(header)
        begin = file.tell()
        for piece in shard:
            made = piece.make()
            for name, planned in piece.tensors.items():
                array = made[name]
                if array.nbytes != planned.num_bytes:
                    raise CheckpointError(f"tensor {name!r} has {array.nbytes} bytes, not {planned.num_bytes}")
                file.seek(begin + fields[name]["data_offsets"][0])
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            del made
            piece.free()
            done += 1
            progress(done)
    return done


def _header(ordered: Mapping[str, Planned]) -> dict[str, Any]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    end = 0
    for name, planned in ordered.items():
        start, end = end, end + planned.num_bytes
        header[name] = {"dtype": planned.dtype, "shape": list(planned.shape), "data_offsets": [start, end]}
    return header


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
