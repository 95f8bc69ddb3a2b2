"""Folders in the formats of `models.formats`, made of a fixture, and beside each the same values as float32."""

import atexit
import functools
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.folder.conversion import Target, config_in, convert
from moonshard.models.folder.writing import write_checkpoint
from moonshard.models.formats.format import BF16
from moonshard.models.formats.known import FORMATS
from moonshard.models.formats.stored import Reader, part_name
from tests.agreement import FIXTURES
from tests.wrapped import copy_companions

EXPERTS = ".mlp.experts."
LEFT = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")  # what is quantised on no hub
TARGETS: Mapping[str, Target] = {"int4": "int4", "fp8": "fp8", "int8": "int8"}
PARTS = {"int4": EXPERTS, "fp8": "", "int8": ""}  # of a matrix' name: as Kimi K2.5, Kimi K2, and what int8 makes


def kept_folder() -> Path:
    """Empty, and there for as long as this process lives."""
    kept = TemporaryDirectory()
    atexit.register(kept.cleanup)
    return Path(kept.name)


@functools.cache
def folders(format_name: str) -> Path:
    """What `write_folders` writes, once a process."""
    folder = kept_folder()
    write_folders(folder, format_name)
    return folder


@functools.cache
def hub_folders() -> Path:
    """`stored`: a folder as Kimi K2.5's on the hub; `wide`: the same values, all of which bfloat16 has."""
    folder = kept_folder()
    (folder / "stored").symlink_to(FIXTURES / "kimi_k25_int4")
    assert convert(folder / "stored", "bf16", folder / "wide").rounded == []
    return folder


@functools.cache
def converted_folders(format_name: Target, fixture: str) -> Path:
    """`stored`: what `moonshard convert` makes of a fixture; `wide`: its values as float32."""
    folder, before = kept_folder(), Checkpoint.open(FIXTURES / fixture)
    convert(before.folder, format_name, folder / "stored")
    reader = Reader(Checkpoint.open(folder / "stored"))
    wide = {name: reader.array(name, before.shape(name)).astype(np.float32) for name in before.names}
    write_checkpoint(folder / "wide", before.config, wide)
    return folder


def guessing_folder(folder: Path, target: Target = "bf16") -> Path:
    """The fixture of Kimi K2 with a layer behind its last that guesses a further token, as DeepSeek-V3's on the hub."""
    before, last = Checkpoint.open(FIXTURES / "kimi_k2"), "model.layers.3."
    width = before.config["hidden_size"]
    tensors = {name: before.tensor(name) for name in before.names}
    own = {name.replace(last, "model.layers.4."): 2 * tensors[name] for name in before.names if name.startswith(last)}
    norms = {f"model.layers.4.{name}.weight": np.ones(width, BF16) for name in ("enorm", "hnorm", "shared_head.norm")}
    table = tensors["lm_head.weight"]
    joined = {"model.layers.4.eh_proj.weight": np.ones((width, 2 * width), BF16)}
    tables = {f"model.layers.4.{name}.weight": table for name in ("embed_tokens", "shared_head.head")}
    config = before.config | {"num_nextn_predict_layers": 1}
    write_checkpoint(folder / "plain", config, tensors | own | norms | joined | tables)
    copy_companions(before.folder, folder / "plain")
    if target != "bf16":
        convert(folder / "plain", target, folder / target)
    return folder / ("plain" if target == "bf16" else target)


def int4_values(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """A matrix straight from the description of compressed-tensors' format, by hand."""
    packed, scales = (checkpoint.tensor(f"{name}.{part}") for part in ("weight_packed", "weight_scale"))
    nibbles = (packed.view(np.uint32)[..., None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    codes = nibbles.reshape(len(packed), -1)[:, : checkpoint.tensor(f"{name}.weight_shape")[1]].astype(np.float32) - 8
    return (codes * scales.astype(np.float32).repeat(32, axis=1)[:, : codes.shape[1]]).astype(BF16)


def write_folders(folder: Path, format_name: str, fixture: str = "kimi_k2", part: str | None = None) -> None:
    """`folder/stored` with its matrices in the format, and `folder/wide` with what those stand for.

    `part`: of the names of matrices that are in the format; None: as the format's models have them.
    """
    checkpoint, format = Checkpoint.open(FIXTURES / fixture), FORMATS[format_name]
    stored, wide = dict[str, np.ndarray](), dict[str, np.ndarray]()
    part = PARTS[format_name] if part is None else part
    for name in checkpoint.names:
        tensor = checkpoint.tensor(name)
        if tensor.ndim < 2 or name.endswith(LEFT) or part not in name:
            stored[name], wide[name] = tensor, tensor.astype(np.float32)
            continue
        values, scales = format.quantise(tensor)
        stored[part_name(name, format.values)], stored[part_name(name, format.scales)] = values, scales
        wide[name] = format.dequantise(values, scales, tensor.shape[1]).astype(np.float32)
    for kind, tensors in (("stored", stored), ("wide", wide)):
        config = config_in(TARGETS[format_name], checkpoint.config) if kind == "stored" else checkpoint.config
        write_checkpoint(folder / kind, config, tensors)
        copy_companions(checkpoint.folder, folder / kind)
