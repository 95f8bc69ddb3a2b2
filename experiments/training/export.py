"""`python -m moonshard.experiments.training.export`: what a run has come to, as the model folder that is served.

That is the mean of the weights of the steps that its recipe names, once it has come to the last of them, and until then
its newest checkpoint. Weights are written in bfloat16 (what is declared float32 stays so), with config.json and
generation_config.json. The tokenizer and the chat template of the folder are not touched: the weights were trained on
them. Source: model soups (arXiv 2203.05482) for the mean, here of checkpoints of one run.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from moonshard.experiments.training.run import loop
from moonshard.experiments.training.run.checkpoints import Checkpoints
from moonshard.experiments.training.run.journal import RUN_FOLDER, TOLD, read_averaged, read_shape
from moonshard.experiments.training.run.recipe import RunFailed
from moonshard.experiments.training.shape import IM_END
from moonshard.experiments.training.texts.corpus import POCKET
from moonshard.models.folder.checkpoint import CONFIG, WEIGHTS
from moonshard.models.folder.writing import write_checkpoint
from moonshard.models.registry import model_of
from moonshard.models.spec import ModelError
from moonshard.models.weights import is_param

GENERATION = "generation_config.json"
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}


def tensors_of(params: Any, weights: Any) -> dict[str, np.ndarray]:
    """Every tensor under its name in a checkpoint, by writing through the view that loading reads through."""
    whole: dict[str, np.ndarray] = {}
    for param, leaf in zip(jax.tree.leaves(params, is_leaf=is_param), jax.tree.leaves(weights), strict=True):
        for place in itertools.product(*(range(size) for size in param.shape[: param.stacked])):
            empty = np.full(param.whole_tensor, np.nan, DTYPES[param.dtype or "bfloat16"])
            param.viewed(whole.setdefault(param.source(*place), empty))[...] = leaf[place]
    return dict(sorted(whole.items()))


def export(run: Path, out: Path) -> tuple[int, ...]:
    """Replaces weights and configuration of the folder `out` by those that the run has come to.

    Returns:
        The steps of the checkpoints that went in.

    Raises:
        RunFailed: there is no run or no checkpoint, either cannot be read, or a value is not finite.
    """
    shape = read_shape(run)
    try:
        params, generation = model_of(shape).declare(), generation_config(shape)
    except KeyError as error:
        raise RunFailed(f"{run / TOLD}: damaged: there is no {error} in its shape") from error
    except ModelError as error:
        raise RunFailed(f"{run / TOLD}: damaged: {error}") from error
    checkpoints = Checkpoints(run / loop.CHECKPOINTS, is_writer=False)
    steps = _steps(run, checkpoints)
    like = jax.tree.map(lambda param: jax.ShapeDtypeStruct(param.shape, np.float32), params, is_leaf=is_param)
    found = [checkpoints.restore(step, {loop.WEIGHTS: like})[loop.WEIGHTS] for step in steps]
    tensors = tensors_of(params, jax.tree.map(lambda *leaves: np.mean(leaves, axis=0, dtype=np.float32), *found))
    if broken := [name for name, tensor in tensors.items() if not np.isfinite(tensor.astype(np.float32)).all()]:
        raise RunFailed(f"{run}: {_named(steps)}: tensor {broken[0]!r} is not finite")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".export-") as folder:
        write_checkpoint(folder, shape, tensors)
        (Path(folder) / GENERATION).write_text(json.dumps(generation, indent=2, sort_keys=True) + "\n")
        for name in (WEIGHTS, GENERATION, CONFIG):
            os.replace(Path(folder) / name, out / name)
    return steps


def _steps(run: Path, checkpoints: Checkpoints) -> tuple[int, ...]:
    """The steps whose weights are averaged: the recipe's, once the run has reached the last of them."""
    newest, averaged = checkpoints.newest(), read_averaged(run)
    if newest is None:
        raise RunFailed(f"{run}: no checkpoint")
    return averaged if averaged and averaged[-1] <= newest else (newest,)


def _named(steps: tuple[int, ...]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {', '.join(map(str, steps))}, their mean"


def generation_config(shape: Mapping[str, Any]) -> dict[str, Any]:
    """Greedy decoding until the assistant's turn ends. KeyError for a shape without its special tokens."""
    return {
        "bos_token_id": shape["bos_token_id"],
        "do_sample": False,
        "eos_token_id": [IM_END, shape["eos_token_id"]],
        "pad_token_id": shape["pad_token_id"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m moonshard.experiments.training.export", description=__doc__)
    parser.add_argument("--run", type=Path, default=RUN_FOLDER, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=POCKET, metavar="DIR", help="default: the embedded model's folder")
    options = parser.parse_args()
    try:
        steps = export(options.run, options.out)
    except (RunFailed, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: the weights of {_named(steps)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
