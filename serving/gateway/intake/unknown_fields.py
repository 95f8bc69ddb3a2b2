"""The names of a body's fields that its struct has none for.

Found in the body's bytes, along the struct that it was decoded into: no value is built, whatever its size.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import msgspec

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_OBJECTS = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a struct knows: the names of its fields and, for those that are structs or lists of them, their shapes."""

    names: frozenset[str]
    inner: Mapping[str, "_Shape"]


def unknown_fields(struct: type[msgspec.Struct], body: bytes) -> Iterator[str]:
    """The paths, such as `messages[0].colour`, of what `struct` has no field for. The body must decode as the
    struct.
    """
    return _unknown(_shape(struct), body, "")


def _unknown(shape: _Shape, value: bytes | msgspec.Raw, path: str) -> Iterator[str]:
    match memoryview(value)[:1].tobytes() if isinstance(value, msgspec.Raw) else b"{":
        case b"{":
            yield from _unknown_in(shape, _OBJECT.decode(value), f"{path}." if path else "")
        case b"[":
            for index, fields in enumerate(_OBJECTS.decode(value)):
                yield from _unknown_in(shape, fields, f"{path}[{index}].")
        case _:  # a string in place of a list of parts, or null
            return


def _unknown_in(shape: _Shape, fields: dict[str, msgspec.Raw], prefix: str) -> Iterator[str]:
    for name, value in fields.items():
        if name not in shape.names:
            yield prefix + name
        elif name in shape.inner:
            yield from _unknown(shape.inner[name], value, prefix + name)


@cache
def _shape(struct: type[msgspec.Struct]) -> _Shape:
    fields = msgspec.structs.fields(struct)
    found = ((field.encode_name, _struct_in(msgspec.inspect.type_info(field.type))) for field in fields)
    inner = {name: _shape(kind) for name, kind in found if kind is not None}
    return _Shape(frozenset(field.encode_name for field in fields), inner)


def _struct_in(kind: msgspec.inspect.Type) -> type[msgspec.Struct] | None:
    """The struct that a field is, or is a list of; None for other fields."""
    match kind:
        case msgspec.inspect.StructType(cls=struct):
            return struct
        case msgspec.inspect.ListType(item_type=item):
            return _struct_in(item)
        case msgspec.inspect.UnionType(types=kinds):
            return next((found for found in map(_struct_in, kinds) if found is not None), None)
        case _:
            return None
