"""How many fields and numbers an encoded message has, read off its bytes before anything is made of it.

A field of two bytes may be a message of its own: 8 MB of them take a second to parse and a hundred times their size to
hold. Tags and lengths alone tell how many there are. Packed numbers are one field, and counted apart: they are parsed
as fast as text, but each is an object to Python. A string that will be decoded as JSON counts a field for each of its
values.
Source: Protocol Buffers, "Encoding".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

VARINT, I64, LEN, I32 = 0, 1, 2, 5  # wire types; LEN: strings, messages and packed numbers
_FIXED_BYTES = {I64: 8, I32: 4}
MAX_VARINT_BITS = 64
JSON_MARKS = (b",", b"{", b"[")  # about as many as values; those in its strings count too
_FIXED_TYPES = {  # numbers that are no varints
    *(FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32, FieldDescriptor.TYPE_FLOAT),
    *(FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64, FieldDescriptor.TYPE_DOUBLE),
}


@dataclass(frozen=True, slots=True)
class FieldCounts:
    """How many fields and packed numbers a message has."""

    num_fields: int
    num_packed: int


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a message's fields hold, by their numbers."""

    messages: Mapping[int, Descriptor]
    packed: frozenset[int]
    json: frozenset[int]


def count_fields(data: bytes, kind: Descriptor, limit: int, json_names: frozenset[str] = frozenset()) -> FieldCounts:
    """The fields of the message and of all messages inside it that `kind` knows.

    Of fields in `json_names` (full names) each JSON value is one more. It takes a microsecond for each field, and ends
    once they are more than `limit`: then the counts are lower bounds.
    DecodeError for bytes that are no message, and for groups, which proto3 has not.
    """
    num_fields = num_packed = 0
    pending = [(0, len(data), kind)]
    while pending and num_fields <= limit:
        offset, end, inner_kind = pending.pop()
        known = _kind(inner_kind, json_names)
        while offset < end and num_fields <= limit:
            num_fields += 1
            tag, offset = _varint(data, offset)
            number, wire_type = tag >> 3, tag & 7
            start, offset = _value(data, offset, wire_type)
            if offset > end:
                raise DecodeError("a field is longer than its message")
            if wire_type != LEN:
                continue
            if (message := known.messages.get(number)) is not None:
                pending.append((start, offset, message))
            elif number in known.packed:
                num_packed += _num_varints(data, start, offset)
            elif number in known.json:
                num_fields += sum(data.count(mark, start, offset) for mark in JSON_MARKS)
    return FieldCounts(num_fields, num_packed)


def _num_varints(data: bytes, start: int, end: int) -> int:
    """Each ends with the only one of its bytes that has no highest bit."""
    return int(np.count_nonzero(np.frombuffer(data, np.int8, end - start, start) >= 0))


def _value(data: bytes, offset: int, wire_type: int) -> tuple[int, int]:
    """Where it begins, behind its length if it has one, and where it ends."""
    if wire_type == LEN:
        length, start = _varint(data, offset)
        return start, start + length
    if wire_type == VARINT:
        return offset, _varint(data, offset)[1]
    if wire_type in _FIXED_BYTES:
        return offset, offset + _FIXED_BYTES[wire_type]
    raise DecodeError(f"no field of ours has wire type {wire_type}")


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    """(value, where it ends)."""
    value = shift = 0
    while shift < MAX_VARINT_BITS and offset < len(data):
        byte = data[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
        shift += 7
    raise DecodeError("a number has no end")


@cache
def _kind(kind: Descriptor, json_names: frozenset[str]) -> _Kind:
    """ValueError for packed numbers of a fixed size, which are not counted."""
    if any(field.is_packed and field.type in _FIXED_TYPES for field in kind.fields):
        raise ValueError(f"{kind.full_name} has packed numbers that are no varints")
    return _Kind(
        messages={field.number: field.message_type for field in kind.fields if field.message_type is not None},
        packed=frozenset(field.number for field in kind.fields if field.is_packed),
        json=frozenset(field.number for field in kind.fields if field.full_name in json_names),
    )
