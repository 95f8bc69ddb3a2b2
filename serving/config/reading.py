"""From a TOML file and `--set key=value` to a `Config`, and back to `--set` for a child process.

One walk over the dataclasses of `keys` checks every value and collects every fault, since a user who has made three
mistakes wants to hear of three; msgspec converts the single values, and alone would stop at the first.
"""

import copy
import difflib
import json
import os
import tomllib
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import msgspec

from moonshard.serving.config.faults import joint_faults
from moonshard.serving.config.keys import EMBEDDED_MODEL_NAME, MAX_DEVICES, Config, ConfigError, embedded_model_path

AUTO, NONE = "auto", "none"
UNSET = (AUTO, NONE)  # how a file spells None: TOML has no null

Tree = dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A configuration, and which of its dotted keys were written rather than left at their default."""

    config: Config
    keys: frozenset[str]


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read `path` (None: all defaults), then apply `overrides`: `dotted.key=value`, with a TOML value or a bare string.

    A relative path in the file is relative to the file; in an override, to the working directory.
    ConfigError names every fault at once.
    """
    tree = {} if path is None else _read(path, path_keys())
    faults = [fault for text in overrides if (fault := _override(tree, text))]
    return _checked(tree, faults)


def load_config_for_others(path: Path | None, overrides: Sequence[str] = (), *, here: Collection[str]) -> Written:
    """As `load_config`, for processes on other machines, to which it is yet to be fitted.

    Of this machine are the paths that the keys `here` name; all others are of theirs, and must be absolute. Nothing is
    looked for on disk, and which values do not fit together is not asked. ConfigError names every fault at once.
    """
    tree = {} if path is None else _read(path, here)
    faults = [fault for text in overrides if (fault := _override(tree, text))]
    written = dict(_written(tree))
    faults += [
        f"{key}: {written[key]} is relative; name it as the other machines have it"
        for key in sorted(path_keys() - set(here))
        if _is_relative(written.get(key))
    ]
    values = _walk(Config, tree, "", faults)
    _complete_model(values, faults)
    if faults:
        raise ConfigError(faults)
    return Written(config=_build(Config, values), keys=frozenset(written))


def config_of(tree: Mapping[str, object]) -> Config:
    """The configuration of tables as a file has them, but with absolute paths. ConfigError names every fault at
    once.
    """
    return _checked(copy.deepcopy(dict(tree)), [])


def all_keys() -> Sequence[str]:
    """The dotted keys that a configuration may have."""
    return [key for key, _ in _all_hints(Config)]


def path_keys() -> frozenset[str]:
    """The dotted keys whose values name a file or a folder."""
    return frozenset(key for key, hint in _all_hints(Config) if _is_path(hint))


def nearest_keys(name: str) -> list[str]:
    """The keys that somebody may have meant; the key itself, if it is one."""
    return [name] if name in all_keys() else _nearest(name, dict(key_hints(Config)), "")


def as_overrides(config: Config) -> list[str]:
    """Every key of the configuration as `dotted.key=value`: `load_config(None, as_overrides(c)) == c`."""
    return [f"{key}={toml_value(value)}" for key, value in leaves(config)]


def leaves(node: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """(dotted key, value) of every key, in the order of the dataclasses."""
    for name, _ in key_hints(type(node)):
        value = getattr(node, name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _checked(tree: Tree, faults: list[str]) -> Config:
    values = _walk(Config, tree, "", faults)
    _complete_model(values, faults)
    faults += [*_missing_model(values.get("model")), *_unreadable(values.get("tls"))]
    if faults:
        raise ConfigError(faults)
    config = _build(Config, values)
    if faults := [*joint_faults(config), *_missing_draft(config)]:
        raise ConfigError(faults)
    return config


def _read(path: Path, here: Collection[str]) -> Tree:
    """Relative paths of the keys `here` are made relative to the file's folder."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"--config {path}: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"--config {path}: not UTF-8 at byte {error.start}"]) from error
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:  # its message names line and column
        raise ConfigError([f"--config {path}: {error}"]) from error
    _beside(path.parent, tree, here)
    return tree


def _beside(folder: Path, tree: Tree, here: Collection[str], prefix: str = "") -> None:
    for name, value in tree.items():
        if isinstance(value, dict):
            _beside(folder, value, here, f"{prefix}{name}.")
        elif f"{prefix}{name}" in here and _names_a_path(value):
            tree[name] = str(folder / Path(str(value)).expanduser())


def _written(tree: Tree, prefix: str = "") -> Iterator[tuple[str, object]]:
    """(dotted key, value) of all that a tree says, known or not."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _written(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _names_a_path(value: object) -> bool:
    return isinstance(value, str) and value not in ("", *UNSET)


def _is_relative(value: object) -> bool:
    return _names_a_path(value) and not Path(str(value)).is_absolute()


def _is_path(hint: object) -> bool:
    return Path in (hint, *typing.get_args(hint))


def _override(tree: Tree, text: str) -> str | None:
    """Put one `key=value` into the tree; the fault, if it is not one."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        return f"--set {text}: expected key=value, for example decode.max_slots=32"
    *tables, name = (part.strip() for part in key.split("."))
    for table in tables:
        inner = tree.get(table)
        tree[table] = tree = inner if isinstance(inner, dict) else {}
    tree[name] = _parse_value(value)
    return None


def _parse_value(text: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def _walk(node: type, tree: Tree, prefix: str, faults: list[str]) -> Tree:
    """The valid part of `tree`, converted; what is wrong with the rest goes to `faults`."""
    values: Tree = {}
    known = dict(key_hints(node))
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name not in known:
            faults.append(_unknown(key, known, prefix))
        elif not is_dataclass(known[name]):
            _convert(key, known[name], value, values, faults)
        elif isinstance(value, dict):
            values[name] = _walk(_class(known[name]), value, f"{key}.", faults)
        else:
            faults.append(f"{key}: expected a table with {', '.join(n for n, _ in key_hints(_class(known[name])))}")
    return values


def _convert(key: str, hint: object, value: object, values: Tree, faults: list[str]) -> None:
    if value in UNSET and type(None) in typing.get_args(hint) and not _is_choice(value, hint):
        value = None
    elif value is None:
        faults.append(f"{key}: expected a value")
        return
    try:
        values[key.rpartition(".")[2]] = msgspec.convert(value, type=hint, dec_hook=_to_path)
    except msgspec.ValidationError as error:
        faults.append(f"{key}: {_explain(error, hint, value)}")


def _is_choice(value: object, hint: object) -> bool:
    """Whether the value has a meaning of its own, where elsewhere it spells None."""
    return any(_is_literal(kind) and value in typing.get_args(kind) for kind in typing.get_args(hint))


def _to_path(hint: type, value: object) -> object:
    if hint is Path and isinstance(value, str) and value:
        return Path(value).expanduser().absolute()
    raise msgspec.ValidationError(f"expected a path, got {value!r}")


def _explain(error: msgspec.ValidationError, hint: object, value: object) -> str:
    if _is_literal(hint):
        choices = [str(choice) for choice in typing.get_args(hint)]
        return f"expected one of {', '.join(choices)}, got {value!r}" + did_you_mean(
            difflib.get_close_matches(str(value), choices, n=1)
        )
    if isinstance(value, list) and (choices := _choices_of_a_list(hint)):
        return f"expected a list of {' or '.join(choices)}, got {value!r}"
    if isinstance(value, str) and (choices := _choices(hint)):
        others = " or a list of several" * bool(_choices_of_a_list(hint)) + " or a number" * _is_number_too(hint)
        return f"expected {', '.join(choices)}{others}, got {value!r}"
    text = str(error).split(", got")[0]
    return f"{text[:1].lower()}{text[1:]}, got {value!r}"


def _choices(hint: object) -> list[str]:
    """The words that a key may have, beside a value of another kind."""
    return [str(word) for kind in typing.get_args(hint) if _is_literal(kind) for word in typing.get_args(kind)]


def _choices_of_a_list(hint: object) -> list[str]:
    lists = (kind for kind in (hint, *typing.get_args(hint)) if typing.get_origin(kind) is tuple)
    return [word for kind in lists for word in _choices(kind)]


def _is_number_too(hint: object) -> bool:
    bases = (getattr(kind, "__origin__", kind) for kind in typing.get_args(hint))  # without its bounds
    return any(base in (int, float) for base in bases)


def _is_literal(hint: object) -> bool:
    return typing.get_origin(hint) is typing.Literal


def _unknown(key: str, siblings: Mapping[str, object], prefix: str) -> str:
    near = _nearest(key, siblings, prefix)
    where = f"[{prefix[:-1]}]" if prefix else "the top level"
    return f"{key}: unknown key" + (did_you_mean(near) or f"; {where} has {', '.join(siblings)}")


def did_you_mean(names: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(names)}?" if names else ""


def _nearest(key: str, siblings: Mapping[str, object], prefix: str) -> list[str]:
    """Valid keys that `key` may have meant: the same name in another table, a like name here, a like name anywhere."""
    name = key.rpartition(".")[2]
    last_names = {k: k.rpartition(".")[2] for k, _ in _all_hints(Config)}
    same = [k for k, last in last_names.items() if last == name]
    here = [prefix + n for n in difflib.get_close_matches(name, siblings, n=1)]
    like = difflib.get_close_matches(name, last_names.values(), n=1, cutoff=0.75)
    return same[:3] or here or [k for k, last in last_names.items() if last in like][:3]


def _all_hints(node: type, prefix: str = "") -> Iterator[tuple[str, object]]:
    """(dotted key, type) of every key and every table."""
    for name, hint in key_hints(node):
        yield prefix + name, hint
        if is_dataclass(hint):
            yield from _all_hints(_class(hint), f"{prefix}{name}.")


def key_hints(node: type) -> Iterator[tuple[str, object]]:
    """(name, type with its bounds) of each field."""
    hints = typing.get_type_hints(node, include_extras=True)
    return ((f.name, _bounded(hints[f.name])) for f in fields(node))


def _bounded(hint: object) -> object:
    """A plain int (an axis of a mesh) is a size: at least 1."""
    return typing.Annotated[int, msgspec.Meta(ge=1, le=MAX_DEVICES)] if hint is int else hint


def _class(hint: object) -> type:
    if not isinstance(hint, type):
        raise TypeError(f"{hint!r} is no class")
    return hint


def _complete_model(values: Tree, faults: list[str]) -> None:
    """Fill in what of [model] has no constant default: the embedded folder, and the name after the folder."""
    model = values.setdefault("model", {})
    if not isinstance(model, dict) or any(fault.startswith("model.path:") for fault in faults):
        return
    if "path" not in model:
        try:
            model |= {"path": embedded_model_path(), "name": model.get("name", EMBEDDED_MODEL_NAME)}
        except ConfigError as error:
            faults.extend(error.faults)
        return
    model.setdefault("name", _name_of(Path(model["path"])))


def _missing_model(model: object) -> list[str]:
    path = model.get("path") if isinstance(model, dict) else None
    if path is None or Path(path).is_dir():
        return []
    return [f"model.path: {path} is not a folder (checkpoints are read from disk, never downloaded)"]


def _missing_draft(config: Config) -> list[str]:
    path = config.speculation.path
    return [] if path is None or path.is_dir() else [f"speculation.path: {path} is not a folder"]


def _name_of(folder: Path) -> str:
    """The model's name, from the folder as the user spelt it: links are not followed, and a snapshot of the hub has its
    repository's name.
    """
    path = Path(os.path.abspath(folder))  # `resolve` follows links
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return path.name


def _unreadable(tls: object) -> list[str]:
    """A fault for each file of [tls] that this process cannot read."""
    faults = []
    for name, path in tls.items() if isinstance(tls, dict) else ():
        try:
            if path is not None:
                Path(path).read_bytes()
        except OSError as error:
            faults.append(f"tls.{name}: {path}: {error.strerror}")
    return faults


def _build[T](node: type[T], values: Mapping[str, object]) -> T:
    hints = dict(key_hints(node))
    return node(**{n: _build(_class(hints[n]), v) if isinstance(v, dict) else v for n, v in values.items()})


def toml_value(value: object) -> str:
    if value is None:
        return json.dumps(NONE)
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, str | Path):  # a JSON string is a TOML string, but for DEL
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
