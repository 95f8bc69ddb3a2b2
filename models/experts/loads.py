"""How often a text uses each routed expert: measured once, kept in a file, and read when experts are placed.

A measurement belongs to the checkpoint it was made with, whose fingerprint the file keeps. Where experts then lie is
decided in `sharding.experts`.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from moonshard.models.score import ROW_TOKENS, Scorer
from moonshard.models.spec import ModelError

PIECE_TOKENS = 8 * ROW_TOKENS  # a text is read in pieces of this length, each a prompt of its own


def measure(
    scorer: Scorer, tokens: Sequence[int], progress: Callable[[int, int], None] = lambda done, total: None
) -> np.ndarray:
    """How many of the tokens chose each expert, [moe layers, experts].

    Args:
        progress: called with (tokens read, tokens in all).

    Raises:
        ModelError: a model without routed experts, or tokens that `models.score.Scorer.observe` refuses.
    """
    config = scorer.config
    if not config.num_moe_layers:
        raise ModelError("the model has no routed experts")
    loads = np.zeros((config.num_moe_layers, config.n_routed_experts), np.int64)
    for start in range(0, max(1, len(tokens)), PIECE_TOKENS):
        piece = tokens[start : start + PIECE_TOKENS]
        chosen = scorer.observe(piece).experts
        assert chosen is not None  # there are MoE layers
        for own, experts in zip(loads, chosen, strict=True):
            own += np.bincount(experts.ravel(), minlength=len(own))
        progress(start + len(piece), len(tokens))
    return loads


def write_loads(path: Path, loads: np.ndarray, fingerprint: str) -> None:
    """Keeps `loads` [moe layers, experts] as JSON. OSError where the file cannot be written."""
    path.write_text(json.dumps({"fingerprint": fingerprint, "loads": loads.tolist()}) + "\n")


def read_loads(path: Path, fingerprint: str, shape: tuple[int, int]) -> np.ndarray:
    """[moe layers, experts], of the checkpoint with this fingerprint.

    Raises:
        ModelError: naming the file that cannot be read, or that is another checkpoint's.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
        of, loads = value["fingerprint"], np.array(value["loads"], np.float64)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{path}: not a file of expert loads: {error}") from error
    if of != fingerprint:
        raise ModelError(f"{path}: measured on another checkpoint, with the fingerprint {str(of)[:12]}")
    if loads.shape != shape or not (np.isfinite(loads) & (loads >= 0)).all():
        raise ModelError(f"{path}: expected {shape[0]} x {shape[1]} loads, each a number from 0 on")
    return loads
