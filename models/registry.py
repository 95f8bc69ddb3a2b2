"""Says which family of models a folder belongs to. No other place names the families.

A new model is a folder beside `kimi` with a class that has `models.model.Model`'s methods, a line in `FAMILIES` (in
`LATENT` if its attention is latent), and the folder's name among the protected modules in pyproject.toml. How it writes
tool calls belongs in `serving.chat.tool_calls`, its tokenizer's file in `models.tokenizers`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moonshard.models.draft import Draft
from moonshard.models.eagle.folder import DraftTensors, open_eagle
from moonshard.models.eagle.taps import TapIds
from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.folder.config_reader import ConfigReader
from moonshard.models.folder.quantization import check_config, check_tensors
from moonshard.models.folder.text_part import text_part
from moonshard.models.kimi import mtp
from moonshard.models.kimi.config import MODEL_TYPES, KimiConfig
from moonshard.models.kimi.family import Kimi
from moonshard.models.model import LatentModel, Model
from moonshard.models.spec import ModelError

LATENT: dict[str, Callable[[Mapping[str, Any]], LatentModel]] = {
    model_type: lambda raw: Kimi(KimiConfig.from_hugging_face(raw)) for model_type in MODEL_TYPES
}
FAMILIES: dict[str, Callable[[Mapping[str, Any]], Model]] = {**LATENT}  # by config.json's model_type


def model_of(raw: Mapping[str, Any]) -> Model:
    """The model that a config.json describes.

    Raises:
        ModelError: `config.json: ` and the field that is missing, ill-typed or unsupported.
    """
    ConfigReader(raw).require("model_type", set(FAMILIES))
    check_config(raw)
    return FAMILIES[raw["model_type"]](raw)


def latent_model_of(raw: Mapping[str, Any]) -> LatentModel:
    """As `model_of`, for a folder whose family has latent attention."""
    ConfigReader(raw).require("model_type", set(LATENT))
    check_config(raw)
    return LATENT[raw["model_type"]](raw)


def open_model(folder: Path) -> tuple[Checkpoint, Model]:
    """The tensors of a folder's text part, and its model.

    Raises:
        CheckpointError, ModelError: with the path of what is wrong.
    """
    checkpoint = text_part(Checkpoint.open(folder))
    try:
        model = model_of(checkpoint.config)
    except ModelError as error:
        raise ModelError(f"{checkpoint.folder}/{error}") from error
    check_tensors(checkpoint)
    return checkpoint, model


def open_draft(
    folder: Path | None, target: Model, target_tensors: Checkpoint, ids: TapIds = "output"
) -> tuple[Checkpoint | DraftTensors, Draft]:
    """A draft for a target: what its weights are loaded from, and the draft.

    Args:
        folder: of an EAGLE-3 draft; None: the layer for multi-token prediction in the target's own folder.
        target_tensors: as `open_model` gives them.
        ids: what the ids of layers in an EAGLE-3 draft's config.json name; see `models.eagle.taps`.

    Raises:
        CheckpointError, ModelError: with the path of what is wrong, such as a draft for another target.
    """
    if folder is not None:
        return open_eagle(folder, target.config, ids)
    if not isinstance(target, Kimi):
        raise ModelError(f"{target_tensors.folder}: models of this family have no layer for multi-token prediction")
    prefix = mtp.prefix_of(target.config)
    if not target_tensors.has(f"{prefix}enorm.weight"):
        raise ModelError(f"{target_tensors.folder}: no layer for multi-token prediction: no {prefix}enorm.weight")
    has_embed, has_head = (target_tensors.has(prefix + name) for name in (mtp.EMBED, mtp.HEAD))
    return target_tensors, mtp.Mtp(config=target.config, has_embed=has_embed, has_head=has_head)
