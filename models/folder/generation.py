"""How a model folder wants to be sampled and stopped, where the client says nothing.

Stop tokens are the union of generation_config.json and config.json: with Kimi the one names <|im_end|>, the other
[EOS], and a server that reads config.json alone never stops. None are guessed from the tokenizer. What
generation_config.json says about beams, lengths and watermarks is ignored.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moonshard.models.folder.json_file import read_json_object, sub_object

MAX_INT = 2.0**31 - 1  # what a request can carry
SMALLEST = math.ulp(0.0)  # for what must be above 0


class GenerationConfigError(ValueError):
    """A folder's generation_config.json or config.json that cannot be used: names file and cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults:
    """The folder's defaults. None means that the folder does not say."""

    stop_token_ids: frozenset[int] = frozenset()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def load_generation_defaults(folder: Path) -> GenerationDefaults:
    """Reads both files; a missing file sets no defaults. Raises GenerationConfigError."""
    generation_path, config_path = folder / "generation_config.json", folder / "config.json"
    generation = read_json_object(generation_path, GenerationConfigError)
    config = read_json_object(config_path, GenerationConfigError)
    # transformers takes the likeliest token then and ignores the rest
    sampling = {"temperature": 0.0} if generation.get("do_sample") is False else generation
    top_k = _number(sampling, "top_k", generation_path, least=-1.0, most=MAX_INT)
    return GenerationDefaults(
        stop_token_ids=_token_ids(generation, generation_path)
        | _token_ids(config, config_path)
        | _token_ids(sub_object(config, "text_config"), config_path),
        temperature=_number(sampling, "temperature", generation_path),
        top_p=_number(sampling, "top_p", generation_path, least=SMALLEST, most=1.0),
        top_k=None if top_k is None else int(top_k),
        min_p=_number(sampling, "min_p", generation_path, most=1.0),
        repetition_penalty=_number(generation, "repetition_penalty", generation_path, least=SMALLEST),
    )


def _token_ids(config: Mapping[str, object], path: Path) -> frozenset[int]:
    value = config.get("eos_token_id")
    if value is None:
        return frozenset()
    listed = value if isinstance(value, list) else [value]
    ids = frozenset(x for x in listed if isinstance(x, int) and not isinstance(x, bool) and x >= 0)
    if len(ids) < len(set(map(repr, listed))):
        raise GenerationConfigError(f"{path}: eos_token_id is {value!r}, expected token ids")
    return ids


def _number(
    config: Mapping[str, object], key: str, path: Path, *, least: float = 0.0, most: float = math.inf
) -> float | None:
    """A finite number from `least` to `most`, so that no default is one that a client could not ask for."""
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise GenerationConfigError(f"{path}: {key} is {value!r}, expected a number")
    if not least <= value <= most:
        raise GenerationConfigError(f"{path}: {key} is {value!r}, out of range")
    return float(value)
