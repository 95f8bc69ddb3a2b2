"""Opens the folder of an EAGLE-3 draft for a target: what it has, what it borrows, whether the two belong together.

Tensors have the hub's names; `layers.0.` is read as `midlayer.`. A missing `embed_tokens` or `lm_head` is the target's.
"""

from pathlib import Path

import numpy as np

from moonshard.models.eagle.config import EagleConfig
from moonshard.models.eagle.draft import Eagle
from moonshard.models.eagle.taps import TapIds
from moonshard.models.eagle.weights import EMBED, HEAD, LAYER, TARGETS, Stored
from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.model import ModelSizes
from moonshard.models.spec import ModelError

ALIAS = "layers.0."
IS_DRAFTED = "t2d"  # [v]: whether the draft can guess a token


class DraftTensors:
    """A folder's tensors as `weights.load` asks for them."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint

    @property
    def fingerprint(self) -> str:
        return self.checkpoint.fingerprint

    def has(self, name: str) -> bool:
        return self.checkpoint.has(self._own(name))

    def tensor(self, name: str) -> np.ndarray:
        """`d2t` in float32, which has every token's number exactly."""
        own = self._own(name)
        if own == TARGETS:
            return self.integers(own).astype(np.float32)
        return self.checkpoint.tensor(own)

    def integers(self, name: str) -> np.ndarray:
        """Of `d2t` [draft_v]. ModelError for another type than I64 or I32."""
        dtype = self.checkpoint.dtype(name)
        if dtype not in ("I64", "I32"):
            raise ModelError(f"{self.checkpoint.where(name)} has dtype {dtype}; I64 is read")
        return self.checkpoint.stored(name).view("<i8" if dtype == "I64" else "<i4")

    def where(self, name: str) -> str:
        return self.checkpoint.where(self._own(name))

    def expect(self, name: str) -> None:
        self.checkpoint.expect(self._own(name))

    def release(self, name: str) -> None:
        self.checkpoint.release(self._own(name))

    def _own(self, name: str) -> str:
        alias = ALIAS + name.removeprefix(LAYER)
        is_alias = name.startswith(LAYER) and not self.checkpoint.has(name) and self.checkpoint.has(alias)
        return alias if is_alias else name


def open_eagle(folder: Path, target: ModelSizes, ids: TapIds = "output") -> tuple[DraftTensors, Eagle]:
    """A draft's tensors, for `weights.load`, and the draft.

    Args:
        ids: what ids of layers in its config.json name; see `taps`.

    Raises:
        CheckpointError: the folder cannot be read. ModelError: it is no draft, or none for this target; with the path
            of what is wrong.
    """
    checkpoint = Checkpoint.open(folder)
    try:
        config = EagleConfig.from_hugging_face(checkpoint.config, target, ids)
    except ModelError as error:
        raise ModelError(f"{checkpoint.folder}/{error}") from error
    tensors = DraftTensors(checkpoint)
    _check_reads(tensors, config)
    _check_tables(tensors, config)
    stored = Stored(has_embed=tensors.has(EMBED), has_head=tensors.has(HEAD), has_targets=tensors.has(TARGETS))
    return tensors, Eagle(config=config, stored=stored)


def _check_reads(tensors: DraftTensors, config: EagleConfig) -> None:
    """That what it reads is as wide as the target's taps are."""
    width, asked = tensors.checkpoint.shape("fc.weight")[-1], len(config.taps) * config.target_hidden_size
    if width != asked:
        ours = f"{len(config.taps)} layers of {config.target_hidden_size} values"
        raise ModelError(f"{tensors.where('fc.weight')} reads {width} values, not {ours}: a draft for another target")


def _check_tables(tensors: DraftTensors, config: EagleConfig) -> None:
    checkpoint, folder = tensors.checkpoint, tensors.checkpoint.folder
    is_whole = config.draft_vocab_size == config.vocab_size
    if not is_whole and not tensors.has(HEAD):
        raise ModelError(f"{folder}: no tensor {HEAD!r}, and the target's has another vocabulary than this draft's")
    if not is_whole and not tensors.has(TARGETS):
        raise ModelError(f"{folder}: no tensor {TARGETS!r}, and the draft's vocabulary is not the target's")
    if tensors.has(TARGETS):
        _check_targets(tensors, config)
    if not config.has_fc_norm and checkpoint.has("fc_norm.0.weight"):
        raise ModelError(f"{checkpoint.where('fc_norm.0.weight')} is there, and config.json says fc_norm is false")


def _check_targets(tensors: DraftTensors, config: EagleConfig) -> None:
    """That every number of the draft's vocabulary is another token of the target's, and `t2d` says the same."""
    deltas, where = tensors.integers(TARGETS), tensors.where(TARGETS)
    if len(deltas) != config.draft_vocab_size:
        raise ModelError(
            f"{where} has {len(deltas)} values; config.json says draft_vocab_size = {config.draft_vocab_size}"
        )
    targets = np.arange(len(deltas)) + deltas
    if targets.min() < 0 or targets.max() >= config.vocab_size or len(np.unique(targets)) != len(targets):
        raise ModelError(f"{where} names no distinct tokens of a vocabulary of {config.vocab_size}")
    if not tensors.has(IS_DRAFTED):
        return
    is_drafted = tensors.checkpoint.stored(IS_DRAFTED) != 0
    if not np.array_equal(np.flatnonzero(is_drafted), np.sort(targets)):
        raise ModelError(f"{tensors.where(IS_DRAFTED)} has other tokens than {TARGETS!r}")
