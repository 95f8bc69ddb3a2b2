"""Writes a folder anew in another number format, as the hub's folders in that format are laid out.

INT4 is Kimi K2.5's: routed experts alone. FP8 (DeepSeek's) and INT8 are of every matrix of attention, MLPs and experts;
embeddings, head, router and norms stay as they are. What was quantised and is not in the new format becomes bfloat16;
what is in it already is copied bit for bit, as are tensors of vision. One matrix after the other is in memory. Names
are those of DeepSeek-V3's family; layers that guess further tokens are converted like any other. transformers 5.23
reads what is written of a folder of text, but for experts in INT8, of which it knows packed ones alone, and FP8 whose
last block is ragged.
"""

import copy
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from moonshard.models.folder.checkpoint import CONFIG, INDEX, Checkpoint, CheckpointError
from moonshard.models.folder.quantization import BLOCK, CONFIG_FIELDS, GROUP
from moonshard.models.folder.text_part import PARTS, SHAPE, TEXT_CONFIG, text_part
from moonshard.models.folder.writing import MAX_SHARD_BYTES, Piece, Planned, write_pieces
from moonshard.models.formats.format import BF16, Format
from moonshard.models.formats.int4 import INT4
from moonshard.models.formats.known import FORMATS
from moonshard.models.formats.stored import WEIGHT, Reader, format_of, part_name
from moonshard.models.spec import ModelError

Target = Literal["bf16", "int4", "fp8", "int8"]
EXPERTS = re.compile(r"\.mlp\.experts\.\d+\.\w+_proj\.weight$")
MATRICES = re.compile(r"\.(self_attn|mlp(\.shared_experts|\.experts\.\d+)?)\.\w+_proj(_with_mqa)?\.weight$")
CONVERTED = {"int4": EXPERTS, "fp8": MATRICES, "int8": MATRICES}
WIDER = ("F32", "F16")  # than bfloat16, or other
SHAPE_TYPES = {"I32": "<i4", "I64": "<i8"}  # Kimi's folders have the first, compressed-tensors writes the second
# What stands beside weights: tokenizers, templates, settings, and code that transformers loads.
COMPANIONS = (".json", ".jinja", ".model", ".py", ".txt")
NOT_COPIED = (CONFIG, INDEX, "hf_quant_config.json")

UNTOUCHED = ["lm_head", r"re:.*mlp\.gate$", r"re:.*eh_proj.*"]
ONLY_EXPERTS = ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
VISION = ["re:.*vision_tower.*", "re:.*mm_projector.*"]


@dataclass(kw_only=True, slots=True)
class Conversion:
    """What was written."""

    num_tensors: int = 0
    num_bytes: int = 0
    num_quantised: int = 0  # matrices
    num_widened: int = 0  # matrices that became bfloat16
    rounded: list[str] = field(default_factory=list)  # of these, the names of those whose values bfloat16 does not have


def convert(
    source: Path,
    to: Target,
    out: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Conversion:
    """Writes the folder `out`. One whose writing was cut short does not open.

    Args:
        progress: called with (matrices and other tensors written, their number in all).

    Raises:
        CheckpointError: a folder that cannot be read, or that cannot be written: it holds a model, or has no room.
        ModelError: a tensor that cannot be served, or that has no values in the new format.
    """
    folder = Checkpoint.open(source)
    _check_is_free(out)
    done = Conversion()
    pieces = list(_Converter(folder, to, done).pieces())
    done.num_tensors = sum(len(piece.tensors) for piece in pieces)
    done.num_bytes = sum(piece.num_bytes for piece in pieces)
    _check_has_room(out, done.num_bytes)
    _copy_companions(source, out)
    write_pieces(out, config_in(to, folder.config), pieces, max_shard_bytes=max_shard_bytes, progress=progress)
    return done


class _Converter:
    """The pieces of the new folder; `done` is counted as they are made."""

    def __init__(self, folder: Checkpoint, to: Target, done: Conversion):
        self._folder, self._text = folder, text_part(folder)
        self._reader = Reader(self._text)
        self._to, self._done = to, done
        self._format = FORMATS.get(to)

    def pieces(self) -> Iterator[Piece]:
        for name in self._text.left_out:
            yield self._copied([name])
        taken = set[str]()
        for name in self._text.names:
            if name not in taken:
                tensors = self._tensors_of(name)
                taken.update(tensors)
                yield self._piece(PARTS.sub(f".{WEIGHT}", name), tensors)

    def _tensors_of(self, name: str) -> list[str]:
        """The tensors that stand for one matrix together, of which this is one; else itself alone."""
        matrix = PARTS.sub(f".{WEIGHT}", name)
        if format_of(self._text, matrix) is None:
            return [name]
        parts = (*self._reader.names(matrix), matrix.removesuffix(WEIGHT) + SHAPE)
        return [part for part in parts if self._text.has(part)]

    def _piece(self, matrix: str, tensors: list[str]) -> Piece:
        stored = format_of(self._text, matrix)
        own = [self._text.prefix + tensor for tensor in tensors]
        if stored is not None and stored is self._format:
            return self._copied(own)
        if stored is None and not (self._text.has(matrix) and len(self._text.shape(matrix)) == 2):
            return self._copied(own)
        if self._format is not None and CONVERTED[self._to].search(matrix):
            return self._quantised(matrix, self._format)
        if stored is not None or (self._to == "bf16" and self._text.dtype(matrix) in WIDER):
            return self._widened(matrix)
        return self._copied(own)

    def _copied(self, names: list[str]) -> Piece:
        """Tensors as they are, of any type, by their names in the file."""
        folder = self._folder
        planned = {name: Planned(dtype=folder.dtype(name), shape=folder.shape(name)) for name in names}

        def free() -> None:
            for name in names:
                folder.release(name)

        def make() -> dict[str, np.ndarray]:
            for name in names:
                folder.expect(name)
            return {name: folder.stored(name) for name in names}

        return Piece(tensors=planned, make=make, free=free)

    def _widened(self, matrix: str) -> Piece:
        name, shape = self._text.prefix + matrix, self._shape(matrix)

        def make() -> dict[str, np.ndarray]:
            found, is_rounded = np.empty(shape, BF16), False
            self._reader.expect(matrix)
            for first, rows in self._reader.rows(matrix, shape):
                own = found[first : first + len(rows)]
                own[:] = rows
                is_rounded = is_rounded or bool((own.astype(rows.dtype) != rows).any())
            self._done.num_widened += 1
            if is_rounded:
                self._done.rounded.append(name)
            return {name: found}

        return Piece(
            tensors={name: Planned(dtype="BF16", shape=shape)}, make=make, free=lambda: self._reader.release(matrix)
        )

    def _quantised(self, matrix: str, format: Format) -> Piece:
        shape, prefix = self._shape(matrix), self._text.prefix
        values, scales = (prefix + part_name(matrix, part) for part in (format.values, format.scales))
        planned = {
            values: Planned(dtype=format.values.spelling, shape=format.stored_shape(shape)),
            scales: Planned(dtype=format.scales.spelling, shape=format.scales_shape(shape)),
        }
        if format is INT4:
            planned[prefix + matrix.removesuffix(WEIGHT) + SHAPE] = Planned(dtype="I32", shape=(2,))

        def make() -> dict[str, np.ndarray]:
            self._reader.expect(matrix)
            codes, factors = self._reader.quantised(matrix, shape, format)
            self._done.num_quantised += 1
            return dict(zip(planned, (codes, factors, np.array(shape, np.int32)), strict=False))

        return Piece(tensors=planned, make=make, free=lambda: self._reader.release(matrix))

    def _shape(self, matrix: str) -> tuple[int, int]:
        """Rows and columns of a matrix, whatever it is stored in."""
        stored = format_of(self._text, matrix)
        rows, items = self._text.shape(matrix if stored is None else part_name(matrix, stored.values))
        columns = items if stored is None else items * stored.codes_per_item
        if stored is not None and stored is INT4 and self._text.has(name := matrix.removesuffix(WEIGHT) + SHAPE):
            dtype = SHAPE_TYPES.get(self._text.dtype(name))
            if dtype is None:
                raise ModelError(f"{self._text.where(name)} has dtype {self._text.dtype(name)}, which is no shape's")
            told = self._text.stored(name).view(dtype).tolist()
            if len(told) != 2 or told[0] != rows or stored.stored_shape((rows, told[1]))[1] != items:
                raise ModelError(f"{self._text.where(name)} is {told}, and the packed codes have {[rows, columns]}")
            columns = told[1]
        return rows, columns


def config_in(to: Target, config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a folder in another format: what it says of quantisation, and of the type of what is not."""
    found = copy.deepcopy(dict(config))
    is_wrapped = isinstance(found.get(TEXT_CONFIG), dict)
    for part in (found, found[TEXT_CONFIG]) if is_wrapped else (found,):
        for name in CONFIG_FIELDS:
            part.pop(name, None)
        for name in {"dtype", "torch_dtype"} & set(part) if to == "bf16" else ():
            part[name] = "bfloat16"
        if to != "bf16":
            part[CONFIG_FIELDS[0]] = _quantization(to, is_wrapped=is_wrapped)
    return found


def _quantization(to: Target, *, is_wrapped: bool) -> dict[str, Any]:
    if to == "fp8":
        kept = {"modules_to_not_convert": ["vision_tower", "mm_projector", "lm_head"]} if is_wrapped else {}
        return {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": BLOCK} | kept
    own = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
    if to == "int8":
        own = {"num_bits": 8, "strategy": "channel", "group_size": None}
    weights = {"type": "int", "symmetric": True, "dynamic": False, "observer": "minmax", "actorder": None, **own}
    layout = "pack-quantized" if to == "int4" else "int-quantized"
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    if to == "int8":
        group["format"] = layout  # of weights alone compressed-tensors takes another for granted
    return {
        "config_groups": {"group_0": group},
        "format": layout,
        "ignore": [*UNTOUCHED, *(ONLY_EXPERTS if to == "int4" else ()), *(VISION if is_wrapped else ())],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _check_is_free(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out}: no folder")
    for existing in (*sorted(out.glob("*.safetensors*")), out / CONFIG):
        if existing.exists():
            raise CheckpointError(f"{existing}: the folder already holds a model")


def _check_has_room(out: Path, num_bytes: int) -> None:
    existing = next(place for place in (out.absolute(), *out.absolute().parents) if place.exists())
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < num_bytes:
        raise CheckpointError(f"{out}: the tensors take {num_bytes} bytes, and {free_bytes} are free")


def _copy_companions(source: Path, out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file in sorted(source.iterdir()):
            if file.suffix in COMPANIONS and file.name not in NOT_COPIED and file.is_file():
                shutil.copyfile(file, out / file.name)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from error
