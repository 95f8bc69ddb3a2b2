"""Nested tables as one mapping from dotted keys to values, and back: sweeps, overrides and comparisons go by key.

A list is a value, whatever it holds. Which keys exist is not checked here.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence

type Flat = dict[str, object]


def flatten(tree: Mapping[str, object], prefix: str = "") -> Flat:
    """Dotted keys to values. Empty tables vanish. A quoted key with dots in it is the same as nested tables."""
    return dict(_leaves(tree, prefix))


def unflatten(flat: Mapping[str, object]) -> dict[str, object]:
    """The reverse of `flatten`. ValueError where one key is both a value and a table."""
    tree: dict[str, object] = {}
    for key, value in flat.items():
        *tables, name = key.split(".")
        inner = tree
        for table in tables:
            found = inner.setdefault(table, {})
            if not isinstance(found, dict):
                raise ValueError(f"{key}: {table} is a value and not a table")
            inner = found
        if name in inner:
            raise ValueError(f"{key} is a table and a value")
        inner[name] = value
    return tree


def below(flat: Mapping[str, object], table: str) -> Flat:
    """The keys of one table, without its name."""
    prefix = f"{table}."
    return {key.removeprefix(prefix): value for key, value in flat.items() if key.startswith(prefix)}


def overridden(flat: Mapping[str, object], overrides: Sequence[str]) -> Flat:
    """With each `dotted.key=value` set, a TOML value or else a string. ValueError for any other form."""
    found = dict(flat)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"--set {text}: expected key=value, for example workload.rate_per_s=2")
        found |= flatten({key.strip(): parse_value(value)})
    return found


def parse_value(text: str) -> object:
    """A TOML value, or the text itself."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def _leaves(tree: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
