"""Folders in the formats of `models.formats`, made of a fixture, and beside each the same values as float32."""

import atexit
import functools
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.folder.conversion import Target, config_in
from moonshard.models.folder.writing import write_checkpoint
from moonshard.models.formats.known import FORMATS
from moonshard.models.formats.stored import part_name
from tests.agreement import FIXTURES

EXPERTS = ".mlp.experts."
LEFT = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")  # what is quantised on no hub
TARGETS: Mapping[str, Target] = {"int4": "int4", "fp8": "fp8", "int8": "int8"}
PARTS = {"int4": EXPERTS, "fp8": "", "int8": ""}  # of a matrix' name: as Kimi K2.5, Kimi K2, and what int8 makes


@functools.cache
def folders(format_name: str, fixture: str = "kimi_k2") -> Path:
    """What `write_folders` writes, once a process, and for as long as it lives."""
    kept = TemporaryDirectory()
    atexit.register(kept.cleanup)
    write_folders(Path(kept.name), format_name, fixture)
    return Path(kept.name)


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
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            (folder / kind / file).write_bytes((FIXTURES / fixture / file).read_bytes())
