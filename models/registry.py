"""Says which family of models a folder belongs to. No other place names the families.

A new model is a folder beside `kimi` with a class that has `models.model.Model`'s methods, a line in `FAMILIES` (in
`LATENT` if its attention is latent), and the folder's name among the protected modules in pyproject.toml. How it writes
tool calls belongs in `serving.chat.tool_calls`, its tokenizer's file in `models.tokenizers`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.folder.config_reader import ConfigReader
from moonshard.models.folder.quantization import check_config, check_tensors
from moonshard.models.folder.text_part import text_part
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
