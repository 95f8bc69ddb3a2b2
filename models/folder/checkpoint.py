"""A Hugging Face checkpoint folder: `config.json` and safetensors files, memory-mapped, checked when opened.

It parses the safetensors format itself, because `safetensors.numpy` cannot map bfloat16 and says little about a broken
file; here every fault is one `CheckpointError` that names the file and the tensor or field. It imports no jax, since
tools, tests and gateways open checkpoints too. What the tensors' names mean is known to the model's own folder
(`models.kimi.weights`), and which of them stand for one matrix together to `models.formats`.
Source: the format's description in the safetensors README; file names as `save_pretrained` of transformers writes them.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from moonshard.models.folder.mapped_file import MappedFile

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
LENGTH_BYTES = 8  # the header's length, little-endian, before the header
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
SAMPLE_BYTES = 4096  # of each end of a tensor, for the fingerprint
READABLE = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I32": np.dtype("<i4"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
}
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


class CheckpointError(ValueError):
    """A folder that cannot be read or written as a checkpoint. The message names the file and the tensor or field."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """Where one tensor lies: bytes `start` to `end` of `file`. `dtype` is in safetensors' spelling."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Checkpoint:
    """An opened folder. Nothing but headers has been read; pages of a tensor come in as it is touched."""

    def __init__(
        self,
        *,
        folder: Path,
        config_text: str,
        entries: dict[str, TensorEntry],
        maps: dict[str, MappedFile],
        prefix: str = "",
        left_out: tuple[str, ...] = (),
    ):
        self.folder = folder
        self.prefix = prefix  # with which the names of all tensors begin in the files, and here do not
        self.left_out = left_out  # names of tensors that the files have besides
        self._config_text = config_text
        self._entries = entries
        self._maps = maps

    @classmethod
    def open(cls, folder: Path | str) -> "Checkpoint":
        """Reads `config.json` and every header, and checks them against the files. Raises CheckpointError."""
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder")
        config = _read_json(folder / CONFIG)
        entries, maps = _open_weights(folder)
        return cls(folder=folder, config_text=_canonical(config), entries=entries, maps=maps)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.folder)!r}, {len(self._entries)} tensors, {self.num_bytes} bytes)"

    @property
    def config(self) -> dict[str, Any]:
        """The content of `config.json` as it stands (a `text_config` stays wrapped), a fresh copy each time."""
        return json.loads(self._config_text)

    @property
    def names(self) -> list[str]:
        return sorted(self._entries)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.end - entry.start for entry in self._entries.values())

    def within(self, prefix: str) -> "Checkpoint":
        """The tensors whose names begin with `prefix`, by what follows it, as if there were no others."""
        return Checkpoint(
            folder=self.folder,
            config_text=self._config_text,
            entries={n.removeprefix(prefix): e for n, e in self._entries.items() if n.startswith(prefix)},
            maps=self._maps,
            prefix=self.prefix + prefix,
            left_out=(*self.left_out, *(self.prefix + n for n in self.names if not n.startswith(prefix))),
        )

    def has(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        """The dtype as safetensors spells it ("BF16", "F32", "I32", ...), also of tensors that `tensor` refuses."""
        return self._entry(name).dtype

    def tensor(self, name: str) -> np.ndarray:
        """The whole tensor: a read-only view of the mapped file, with `ml_dtypes`' types where numpy has none. Only
        what is touched of it is read: a device takes its slice.

        Raises CheckpointError for an unknown name, and for dtypes other than those of `READABLE`.
        """
        entry = self._entry(name)
        if entry.dtype not in READABLE:
            raise CheckpointError(f"{self.where(name)} has dtype {entry.dtype}; {', '.join(READABLE)} can be read")
        return self._bytes(entry).view(READABLE[entry.dtype]).reshape(entry.shape)

    def stored(self, name: str) -> np.ndarray:
        """A tensor's bytes as they lie in the file, of any dtype: a read-only view."""
        return self._bytes(self._entry(name))

    def where(self, name: str) -> str:
        """The tensor and its file, as a message begins with them."""
        return f"{self.folder / self._entry(name).file}: tensor {self.prefix + name!r}"

    def expect(self, name: str) -> None:
        """Has a tensor read in the background that is about to be touched as a whole: page by page it takes long."""
        entry = self._entry(name)
        self._maps[entry.file].expect(entry.start, entry.end)

    def release(self, name: str) -> None:
        """Takes what was read of a tensor out of this process's memory; views of it stay good."""
        entry = self._entry(name)
        self._maps[entry.file].release(entry.start, entry.end)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of what is served: workers with the same fingerprint hold the same model.

        Over `config.json` with sorted keys, and in order of name each tensor's name, dtype and shape with its first and
        last 4 KiB. How tensors are spread over files does not enter. Sampled, since hashing all of a large model takes
        minutes: an edit strictly inside a tensor goes unseen.
        """
        digest = sha256(self._config_text.encode())
        for entry in self._entries.values():
            for start, end in ((entry.start, entry.start + SAMPLE_BYTES), (entry.end - SAMPLE_BYTES, entry.end)):
                self._maps[entry.file].expect(max(start, entry.start), min(end, entry.end))
        for name in self.names:
            entry = self._entries[name]
            content = self._bytes(entry)
            about = json.dumps([name, entry.dtype, entry.shape]).encode()
            for part in (about, content[:SAMPLE_BYTES].tobytes(), content[-SAMPLE_BYTES:].tobytes()):
                digest.update(len(part).to_bytes(LENGTH_BYTES, "little"))  # so that no two lists of parts read the same
                digest.update(part)
        return digest.hexdigest()

    def _entry(self, name: str) -> TensorEntry:
        try:
            return self._entries[name]
        except KeyError:
            raise CheckpointError(f"{self.folder}: no tensor {self.prefix + name!r}") from None

    def _bytes(self, entry: TensorEntry) -> np.ndarray:
        return self._maps[entry.file].bytes[entry.start : entry.end]


def _open_weights(folder: Path) -> tuple[dict[str, TensorEntry], dict[str, MappedFile]]:
    """All tensors by name, and each file by its name."""
    weight_map: dict[str, str] = {}
    if (folder / WEIGHTS).exists():  # transformers too prefers the single file where both exist
        files = [WEIGHTS]
    elif (folder / INDEX).exists():
        weight_map = _read_weight_map(folder / INDEX)
        files = sorted(set(weight_map.values()))
    else:
        raise CheckpointError(f"{folder}: no weights: neither {WEIGHTS} nor {INDEX}")
    entries: dict[str, TensorEntry] = {}
    maps: dict[str, MappedFile] = {}
    for file in files:
        maps[file] = _map_file(folder / file)
        for name, entry in _read_header(folder / file, maps[file]).items():
            if name in entries:
                raise CheckpointError(f"{folder / file}: tensor {name!r} is already in {entries[name].file}")
            entries[name] = entry
    for name, file in weight_map.items():
        if name not in entries or entries[name].file != file:
            raise CheckpointError(f"{folder / INDEX}: tensor {name!r} is not in {file}")
    return entries, maps


def _read_weight_map(path: Path) -> dict[str, str]:
    """The index's `weight_map`: tensor name to file name, each a plain name of an existing file in the same folder."""
    weight_map = _read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is missing, empty or no object")
    for name, file in weight_map.items():
        if not isinstance(file, str) or file != Path(file).name:
            raise CheckpointError(f"{path}: weight_map gives tensor {name!r} no plain file name: {file!r}")
        if not (path.parent / file).is_file():
            raise CheckpointError(f"{path}: tensor {name!r} is in {file}, which does not exist")
    return weight_map


def _map_file(path: Path) -> MappedFile:
    try:
        if path.stat().st_size < LENGTH_BYTES:
            raise CheckpointError(f"{path}: truncated: {path.stat().st_size} bytes, a safetensors file starts with 8")
        return MappedFile(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def _read_header(path: Path, file: MappedFile) -> dict[str, TensorEntry]:
    """The tensors of one file, whose byte ranges fill it exactly (as the format demands)."""
    content = file.bytes
    header_bytes = int.from_bytes(content[:LENGTH_BYTES].tobytes(), "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: not a safetensors file: it does not begin with the length of a header")
    data_start = LENGTH_BYTES + header_bytes
    if data_start > len(content):
        raise CheckpointError(f"{path}: truncated in its header: {data_start - len(content)} bytes are missing")
    file.expect(0, data_start)
    header = _parse_json(path, content[LENGTH_BYTES:data_start].tobytes(), what="the header")
    fields = ((name, value) for name, value in header.items() if name != "__metadata__")
    entries = {name: _parse_entry(path, name, value, data_start) for name, value in fields}
    _check_ranges(path, entries, data_start, len(content))
    return entries


def _parse_entry(path: Path, name: str, value: object, data_start: int) -> TensorEntry:
    where = f"{path}: tensor {name!r}"
    if not isinstance(value, dict) or not isinstance(value.get("dtype"), str):
        raise CheckpointError(f"{where}: dtype is missing or no string")
    dtype, shape, offsets = value["dtype"], value.get("shape"), value.get("data_offsets")
    if not _is_sizes(shape):
        raise CheckpointError(f"{where}: shape is no list of sizes: {shape!r}")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets are no [start, end]: {offsets!r}")
    num_bytes = offsets[1] - offsets[0]
    if dtype in ITEM_BYTES and num_bytes != prod(shape) * ITEM_BYTES[dtype]:
        raise CheckpointError(
            f"{where}: {dtype} {shape} takes {prod(shape) * ITEM_BYTES[dtype]} bytes, not {num_bytes}"
        )
    start, end = data_start + offsets[0], data_start + offsets[1]
    return TensorEntry(file=path.name, dtype=dtype, shape=tuple(shape), start=start, end=end)


def _check_ranges(path: Path, entries: dict[str, TensorEntry], data_start: int, file_bytes: int) -> None:
    """Raises unless the tensors cover `data_start` to the file's end without gap or overlap."""
    ranges = sorted((entry.start, entry.end, name) for name, entry in entries.items())
    data_end = max((end for _, end, _ in ranges), default=data_start)
    if data_end > file_bytes:
        name = next(name for _, end, name in ranges if end > file_bytes)
        raise CheckpointError(f"{path}: truncated: {data_end - file_bytes} bytes are missing, from tensor {name!r} on")
    if data_end < file_bytes:
        raise CheckpointError(f"{path}: {file_bytes - data_end} bytes at the end belong to no tensor")
    for (_, end, before), (start, _, name) in pairwise([(data_start, data_start, "the header"), *ranges]):
        if start != end:
            fault = "overlaps" if start < end else "leaves a gap after"
            raise CheckpointError(f"{path}: tensor {name!r} {fault} {before!r}")


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    return _parse_json(path, content, what="the file")


def _parse_json(path: Path, content: bytes, *, what: str) -> dict[str, Any]:
    """One JSON object in which no name stands twice."""
    try:
        value = json.loads(content.decode(), object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {what} is broken JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: {what} is no JSON object")
    return value


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands twice")
    return unique


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
