"""How a worker holds its weights: as `model.weights` asks, as far as the machine's kernels can read them so."""

import logging
from collections.abc import Iterable
from hashlib import sha256
from typing import Any

import jax

from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.formats.holding import Holding, is_lossy
from moonshard.models.formats.quantised import Quantised
from moonshard.models.machines import Machine
from moonshard.models.model import Model
from moonshard.serving.config.keys import Config

logger = logging.getLogger(__name__)

HELD_AS = {"float32": "float32", "bf16": "bfloat16"}  # by `model.weights`, as `model.dtype` spells it


def holding_of(config: Config, machine: Machine) -> Holding | None:
    """As asked for where kernels read weights so. Else arrays are held in what is computed in, formats as asked for."""
    asked = config.model.weights
    if machine.reads_in_place or asked == "int8":
        return asked
    return None if asked == "native" else "computed"


def tell_how_weights_are_held(
    config: Config, holding: Holding | None, machine: Machine, platform: str, dtype: str, held: Iterable[Any]
) -> None:
    """Says in which formats weights stay, and where that is not what was asked for, or is slow.

    Args:
        held: trees of weights, which may be abstract.
    """
    asked, where = config.model.weights, "on a GPU" if platform == "gpu" else "without kernels for CPUs"
    if holding == "computed" and dtype != HELD_AS[asked]:
        logger.warning("model.weights: not held as %s, but as they are computed in, %s: %s", asked, dtype, where)
    leaves = jax.tree.leaves(list(held), is_leaf=lambda leaf: isinstance(leaf, Quantised))
    if formats := " and ".join(sorted({leaf.format for leaf in leaves if isinstance(leaf, Quantised)})):
        logger.info("model.weights: matrices are held in %s", formats)
        if platform == "cpu" and not machine.reads_in_place:
            logger.warning("model.weights: %s is widened in every step, which is slow: %s", formats, where)


def fingerprint_of(checkpoint: Checkpoint, model: Model, dtype: str, holding: Holding | None) -> str:
    """The folder's, or one of its own where weights are held with other values than the folder's."""
    if not is_lossy(model.declare(), checkpoint, dtype, holding):
        return checkpoint.fingerprint
    return sha256(f"{checkpoint.fingerprint} held as {holding}".encode()).hexdigest()
