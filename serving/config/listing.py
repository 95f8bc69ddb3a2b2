"""Every key of the configuration with its default and its meaning, as lines that a TOML file could have.

Meanings are the comments beside the keys in the dataclasses' own source, so that they stand in one place. That source
is a part of every installation.
"""

import ast
import inspect
import io
import tokenize
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass

from moonshard.serving.config.keys import Config
from moonshard.serving.config.reading import AUTO, key_hints, toml_value


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    name: str  # dotted
    default: str | None  # as TOML; None: there is no constant one
    meaning: str  # empty where its name says it


def listed_keys(prefix: str = "") -> list[Key]:
    """The keys that begin with `prefix`, in the order of the dataclasses."""
    return [key for key in _keys(Config, "") if key.name.startswith(prefix)]


def as_lines(keys: list[Key]) -> list[str]:
    """`key = default  # meaning`, the meanings below each other; without a constant default the line is a comment."""
    heads = [f"# {key.name} =" if key.default is None else f"{key.name} = {key.default}" for key in keys]
    width = max(map(len, heads), default=0)
    return [f"{head:{width}}  # {key.meaning}".rstrip("# ") for head, key in zip(heads, keys, strict=True)]


def _keys(node: type, prefix: str) -> Iterator[Key]:
    meanings, defaults = _comments(node), {field.name: field for field in fields(node)}
    for name, hint in key_hints(node):
        if isinstance(hint, type) and is_dataclass(hint):
            yield from _keys(hint, f"{prefix}{name}.")
            continue
        default, meaning = defaults[name].default, meanings.get(name, "")
        yield Key(name=prefix + name, default=_written(default, meaning), meaning=meaning)


def _written(default: object, meaning: str) -> str | None:
    """The default as TOML. None is spelt `none` where the meaning says what that is, else `auto`."""
    if default is MISSING:
        return None
    return toml_value(AUTO if default is None and "none:" not in meaning else default)


def _comments(node: type) -> dict[str, str]:
    """The comments of each field, inherited ones too: the comment above it and the one beside it, as one text."""
    found: dict[str, str] = {}
    for base in reversed([base for base in node.__mro__ if is_dataclass(base)]):
        source = inspect.cleandoc("\n" + inspect.getsource(base))
        beside = {
            token.start[0]: (token.string.lstrip("# "), token.line.strip().startswith("#"))
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT
        }
        (definition,) = ast.parse(source).body
        assert isinstance(definition, ast.ClassDef)  # the source of a class
        for statement in definition.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                name = statement.target.id
                found[name] = _comment_of(statement, beside) or found.get(name, "")
    return found


def _comment_of(statement: ast.AnnAssign, beside: dict[int, tuple[str, bool]]) -> str:
    """`beside`: by line, each comment's text and whether it has the line for itself."""
    above = []
    line = statement.lineno - 1
    while beside.get(line, ("", False))[1]:
        above.insert(0, beside[line][0])
        line -= 1
    same = beside.get(statement.end_lineno or statement.lineno)
    return " ".join([*above, *([same[0]] if same else [])])
