"""Reads one JSON object out of a model folder, for the tokenizer, the generation defaults and the chat template.

All of them fail alike, by naming the file. The checkpoint's own index is read in `checkpoint`.
"""

import json
from pathlib import Path


def read_json_object(path: Path, error: type[ValueError]) -> dict[str, object]:
    """The object in `path`, empty when there is no such file. Raises `error` naming a file that holds anything else."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as cause:
        raise error(f"{path}: {cause}") from cause
    if not isinstance(value, dict):
        raise error(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def sub_object(value: dict[str, object], key: str) -> dict[str, object]:
    """The object under `key`, empty when there is none."""
    inner = value.get(key)
    return inner if isinstance(inner, dict) else {}
