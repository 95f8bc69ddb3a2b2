"""JSON as RFC 8259 has it. Python's parser also takes NaN and Infinity, which no server has to, and may recurse."""

import json
from typing import Any


def parse(text: str | bytes) -> Any:
    """The value. ValueError for whatever is not JSON, also for bytes that are not UTF-8 and for nesting without end."""
    try:
        return json.loads(text.decode() if isinstance(text, bytes) else text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
