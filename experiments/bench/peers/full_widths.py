"""Writes a folder with Kimi K2's true widths and few layers, in K2.5's number format: what one machine can load of it.

One dense layer and two with experts in INT4: 24.8 MB an expert, 19 GB with all 384, and 1.7 GB besides. Values are
random and its answers noise; bytes, layout and speed are those of the real weights. The vocabulary is the embedded
model's, whose tokenizer it has: the real one's tables would take 4.7 GB of bfloat16. Memory is that of one matrix.
Source: Kimi K2 (arXiv 2507.20534), table 2; the layout of moonshotai/Kimi-K2.5 on the hub.
"""

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from moonshard.experiments.bench.peers.proportions import shapes
from moonshard.experiments.training.texts.corpus import POCKET
from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.folder.conversion import EXPERTS, config_in
from moonshard.models.folder.known import KNOWN
from moonshard.models.folder.text_part import PREFIX
from moonshard.models.folder.writing import Piece, Planned, write_pieces
from moonshard.models.formats.int4 import INT4
from moonshard.models.formats.stored import part_name

NUM_LAYERS, NUM_EXPERTS, SEED = 3, 384, 0
MEAN_CODE = 4.61  # the deviation of codes that are drawn evenly from -8 to 7
KEPT = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def config_of(num_experts: int, **changes: Any) -> dict[str, Any]:
    """config.json, in K2.5's own arrangement."""
    pocket = Checkpoint.open(POCKET).config
    ends = {name: pocket[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in pocket}
    text = {
        **KNOWN["kimi-k2.5"].config,
        "vocab_size": pocket["vocab_size"],
        "num_hidden_layers": NUM_LAYERS,
        "n_routed_experts": num_experts,
        **ends,
        **changes,
    }
    return config_in("int4", {"model_type": "kimi_k25", "text_config": text, **ends})


def pieces(text: dict[str, Any], seed: int = SEED) -> Iterator[Piece]:
    """Every matrix and vector, from a generator of its own each, so that all are the same whatever else is written."""
    for index, (name, shape) in enumerate(shapes(text)):
        random = np.random.default_rng((seed, index))
        yield _expert(name, shape, random) if EXPERTS.search(name) else _plain(name, shape, random)


def _plain(name: str, shape: tuple[int, ...], random: np.random.Generator) -> Piece:
    is_bias, is_norm = name.endswith("e_score_correction_bias"), name.endswith("norm.weight")
    dtype = np.dtype(np.float32 if is_bias else ml_dtypes.bfloat16)

    def make() -> dict[str, np.ndarray]:
        if is_bias or is_norm:
            return {PREFIX + name: np.full(shape, float(is_norm), dtype)}
        drawn = random.standard_normal(shape, np.float32)
        drawn *= np.float32(shape[-1] ** -0.5)
        return {PREFIX + name: drawn.astype(dtype)}

    return Piece(tensors={PREFIX + name: Planned(dtype="F32" if is_bias else "BF16", shape=shape)}, make=make)


def _expert(name: str, shape: tuple[int, ...], random: np.random.Generator) -> Piece:
    rows, columns = shape
    words, scales = INT4.stored_shape((rows, columns)), INT4.scales_shape((rows, columns))
    planned = {
        PREFIX + part_name(name, INT4.values): Planned(dtype="I32", shape=words),
        PREFIX + part_name(name, INT4.scales): Planned(dtype="BF16", shape=scales),
        PREFIX + name + "_shape": Planned(dtype="I32", shape=(2,)),
    }

    def make() -> dict[str, np.ndarray]:
        codes = random.integers(-(2**31), 2**31, words, np.int32)
        factors = random.uniform(0.5, 1.5, scales) * (columns**-0.5 / MEAN_CODE)
        return dict(zip(planned, (codes, factors.astype(ml_dtypes.bfloat16), np.array(shape, np.int32)), strict=True))

    return Piece(tensors=planned, make=make)


def write(folder: Path, num_experts: int = NUM_EXPERTS, **changes: Any) -> None:
    """Writes the folder; `changes` to the text part's configuration make it smaller.

    CheckpointError where it already holds weights, or has no room for these.
    """
    config = config_of(num_experts, **changes)
    write_pieces(folder, config, list(pieces(config["text_config"])))
    for file in KEPT:
        if (POCKET / file).exists():
            shutil.copy(POCKET / file, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder, made where it is not there; it must hold no weights yet")
    parser.add_argument("--experts", type=int, default=NUM_EXPERTS, help="in each of the two layers, at least 8")
    options = parser.parse_args()
    if options.experts < KNOWN["kimi-k2.5"].config["num_experts_per_tok"]:
        parser.error(f"--experts {options.experts}: a token has 8 of them")
    try:
        write(options.out, options.experts)
    except (OSError, ValueError) as error:
        raise SystemExit(f"moonshard: {error}") from error


if __name__ == "__main__":
    main()
