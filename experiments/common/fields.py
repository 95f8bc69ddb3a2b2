"""A table of options read into a dataclass: every fault with its key, and for an unknown key the nearest known one.

The server's own, nested configuration is read in `serving.config.reading`.
"""

import difflib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path

import msgspec

MAX_NAMED = 30  # keys in one message


class ExperimentError(ValueError):
    """An experiment that cannot be run, or runs that cannot be read. `faults` names every fault."""

    def __init__(self, *faults: str):
        super().__init__("\n".join(faults))
        self.faults = faults


def read_fields[T](kind: type[T], given: Mapping[str, object], table: str, faults: list[str]) -> T | None:
    """Reads a table into a dataclass; None where `faults` got an entry. `table` is the keys' prefix, "" for none."""
    prefix = f"{table}." if table else ""
    hints = typing.get_type_hints(kind, include_extras=True)
    known = {field.name: field for field in fields(typing.cast(typing.Any, kind))}
    found, wrong = {}, [unknown_key(prefix + key, (prefix + n for n in known)) for key in given if key not in known]
    for name, field in known.items():
        if name in given:
            try:
                found[name] = msgspec.convert(given[name], type=hints[name], dec_hook=_to_path)
            except msgspec.ValidationError as error:
                wrong.append(f"{prefix}{name}: {_explain(error, given[name])}")
        elif _is_needed(field):
            wrong.append(f"{prefix}{name}: needed, and not given")
    faults += wrong
    return None if wrong else kind(**found)


def unknown_key(key: str, known: Iterable[str]) -> str:
    """What to say of an unknown key: the nearest known one, or all; where there are many, their prefixes."""
    known = list(known)
    last = key.rpartition(".")[2]
    near = difflib.get_close_matches(key, known, n=1) or [k for k in known if k.rpartition(".")[2] == last]
    if near:
        return f"{key}: unknown key; did you mean {near[0]}?"
    names = known if len(known) <= MAX_NAMED else dict.fromkeys(name.partition(".")[0] for name in known)
    return f"{key}: unknown key; there are {', '.join(names)}"


def _is_needed(field: Field[object]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _to_path(hint: type, value: object) -> object:
    if hint is Path and isinstance(value, str) and value:
        return Path(value).expanduser().absolute()
    raise msgspec.ValidationError(f"expected a path, got {value!r}")


def _explain(error: msgspec.ValidationError, value: object) -> str:
    text = str(error).split(", got")[0]
    return f"{text[:1].lower()}{text[1:]}, got {value!r}"
