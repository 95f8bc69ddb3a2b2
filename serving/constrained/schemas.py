"""JSON schemas: whether anything could keep to one, and where in it a feature is that is not supported.

llguidance compiles a schema that only endless values keep to (`{"required": ["a"], "properties": {"a": {"$ref":
"#"}}}`), and its answer would never end; it names a feature that it lacks, and not its place. Pure.

Source: JSON Schema, draft 2020-12; RFC 6901 (JSON pointers).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import final

MAX_LEVELS = 100  # llguidance reads 128, with those around the schema
_MAX_PASSES = 16  # over a schema's references
_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
# What llguidance says of what it lacks, and the key whose value it quotes; without one it quotes the key.
_COMPLAINTS = (
    (re.compile(r'Unimplemented keys: \["(?P<quoted>[^"]+)"'), None),
    (re.compile(r"Unknown format: (?P<quoted>\S+)"), "format"),
    (re.compile(r"Invalid type: (?P<quoted>\S+)"), "type"),
    (re.compile(r"Pointer '(?P<quoted>[^']*)' does not exist"), "$ref"),
    (re.compile(r"Resource '(?P<quoted>[^']*)' is not present"), "$ref"),
    (re.compile(r"(?P<quoted>oneOf) constraints are not supported"), None),
)


class SchemaError(ValueError):
    """A schema that no answer could keep to, or that is too large to look at."""


def check_schema(schema: Mapping[str, object]) -> None:
    """SchemaError where it is nested too deeply, or where whatever kept to it would have no end."""
    if _is_deeper(schema, MAX_LEVELS):
        raise SchemaError(f"it is nested deeper than {MAX_LEVELS} levels")
    try:
        is_endless = not _Ends(schema).is_found()
    except RecursionError:
        raise SchemaError("its references follow each other too deeply") from None
    if is_endless:
        raise SchemaError("whatever kept to it would have no end: it requires itself")


def place_of(schema: Mapping[str, object], complaint: str) -> str | None:
    """The JSON pointer of what llguidance complains of; None where it does not say, or where it may be several."""
    for pattern, key in _COMPLAINTS:
        if (match := pattern.search(complaint)) is not None:
            return _place(schema, key, match["quoted"])
    return None


def _place(schema: Mapping[str, object], key: str | None, quoted: str) -> str | None:
    found = quoted if key is None else key
    places = (
        f"{pointer}/{found}"
        for pointer, each in _subschemas(schema, "#")
        if found in each and (key is None or str(each[key]).removeprefix("#") == quoted)
    )
    first = next(places, None)
    return None if found == "oneOf" and next(places, None) is not None else first  # some of these are supported


def _subschemas(schema: object, pointer: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    """It and all within it, with their places."""
    pending = [(pointer, schema)]
    while pending:
        at, each = pending.pop()
        if not isinstance(each, Mapping):
            continue
        yield at, each
        pending += reversed([(f"{at}/{step}", inner) for step, inner in _inner(each)])


def _inner(schema: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in schema.items():
        if key in _SCHEMAS:
            yield key, value
        elif key in _OF_SCHEMAS and isinstance(value, Mapping):
            yield from ((f"{key}/{_escaped(str(name))}", each) for name, each in value.items())
        elif key in _LISTS and isinstance(value, Sequence) and not isinstance(value, str):
            yield from ((f"{key}/{index}", each) for index, each in enumerate(value))


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _is_deeper(value: object, levels: int) -> bool:
    pending = [(value, 0)]
    while pending:
        each, depth = pending.pop()
        if depth > levels:
            return True
        if isinstance(each, Mapping):
            pending += [(inner, depth + 1) for inner in each.values()]
        elif isinstance(each, list | tuple):
            pending += [(inner, depth + 1) for inner in each]
    return False


@final
class _Ends:
    """Looks for a value of an end that keeps to a schema, by what its references could be.

    What is not known here counts as having an end: whether it can be served is llguidance's to say.
    """

    def __init__(self, schema: Mapping[str, object]):
        self._schema = schema
        self._ending: set[str] = set()  # references to what has an end
        self._seen: set[str] = set()  # in this pass
        self._found: dict[int, bool] = {}  # in this pass, by identity: a schema may be asked about many times

    def is_found(self) -> bool:
        for _ in range(_MAX_PASSES):
            num_known, self._seen, self._found = len(self._ending), {"#"}, {}
            if self._has_end(self._schema):
                return True
            if len(self._ending) == num_known:
                return False
        return True  # whoever writes so many references in each other's way is not refused for it

    def _has_end(self, schema: object) -> bool:
        if not isinstance(schema, Mapping):
            return True
        if id(schema) not in self._found:
            self._found[id(schema)] = self._looked_at(schema)
        return self._found[id(schema)]

    def _looked_at(self, schema: Mapping[str, object]) -> bool:
        if "$ref" in schema and not self._refers_to_end(str(schema["$ref"])):
            return False
        if any(not self._has_end(each) for each in _list(schema.get("allOf"))):
            return False
        for key in ("anyOf", "oneOf"):
            if (members := _list(schema.get(key))) and not any(self._has_end(each) for each in members):
                return False
        if "enum" in schema or "const" in schema or "type" not in schema:  # without a type a text keeps to it too
            return True
        kinds = schema["type"]
        kinds = (kinds,) if isinstance(kinds, str) else _list(kinds)
        return not kinds or any(self._kind_has_end(schema, kind) for kind in kinds)

    def _kind_has_end(self, schema: Mapping[str, object], kind: object) -> bool:
        if kind == "object":
            properties, others = _mapping(schema.get("properties")), schema.get("additionalProperties")
            names = [name for name in _list(schema.get("required")) if isinstance(name, str)]
            return all(self._has_end(properties.get(name, others)) for name in names)
        if kind == "array":
            least, first = schema.get("minItems"), _list(schema.get("prefixItems"))
            num = least if isinstance(least, int) else 0
            return all(map(self._has_end, first[:num])) and (num <= len(first) or self._has_end(schema.get("items")))
        return True

    def _refers_to_end(self, reference: str) -> bool:
        if reference in self._ending:
            return True
        if reference in self._seen:
            return False
        self._seen.add(reference)
        if self._has_end(self._target(reference)):
            self._ending.add(reference)
            return True
        return False

    def _target(self, reference: str) -> object:
        """What it points at; None, which has an end, where that is not in the schema."""
        if not reference.startswith("#/"):
            return self._schema if reference == "#" else None
        found: object = self._schema
        for step in reference.split("/")[1:]:
            found = _mapping(found).get(step.replace("~1", "/").replace("~0", "~"))
        return found


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else ()


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}
