"""`moonshard score`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from moonshard.serving.config.keys import ConfigError
from moonshard.serving.deploy.startup import prepare_jax
from moonshard.sharding.shape import MeshShape


def score(
    model: Path,
    out: Path,
    tokens: Annotated[str, tyro.conf.arg(metavar="1,2,3")] = "",
    tokens_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> int:
    """Compute the logits of a prompt's every position and save them as float32 [tokens, vocab].

    Args:
        model: the checkpoint's folder.
        out: the .npy file to write.
        tokens: the prompt's token ids.
        tokens_file: a file of token ids, separated by commas or white space, instead of --tokens.
        dtype: what to compute in.
    """
    prompt = _read_tokens(tokens, tokens_file)
    _check_writable(out)
    prepare_jax(MeshShape())
    import numpy as np

    from moonshard.models.score import score as compute

    logits = compute(model, prompt, dtype)
    try:
        with out.open("wb") as file:
            np.save(file, logits.astype(np.float32, copy=False))
    except OSError as error:
        raise ConfigError([f"--out {out}: {error.strerror}"]) from error
    return 0


def _read_tokens(text: str, file: Path | None) -> Sequence[int]:
    if bool(text) == bool(file):
        raise ConfigError(["--tokens: give either --tokens or --tokens-file"])
    if file:
        try:
            text = file.read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([f"--tokens-file {file}: {error}"]) from error
    words = text.replace(",", " ").split()
    if bad := next((word for word in words if not (word.isascii() and word.isdigit())), None):
        raise ConfigError([f"--tokens: {bad!r} is no token id"])
    return [int(word) for word in words]


def _check_writable(out: Path) -> None:
    """Better known before the computation than after it."""
    place = out if out.exists() else out.parent
    if out.is_dir() or not place.exists() or not os.access(place, os.W_OK):
        raise ConfigError([f"--out {out}: cannot be written"])
