"""How many fields and numbers an encoded message has, read off its bytes before anything is made of it.

A field of two bytes may be a message of its own: 8 MB of them take a second to parse and a hundred times their size to
hold. Tags and lengths alone tell how many there are. Packed numbers are one field, and counted apart: they are parsed
as fast as text, but each is an object to Python. Of a string that is JSON each value is a field, for whoever reads it.
Source: Protocol Buffers, "Encoding".
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

VARINT, I64, LEN, I32 = 0, 1, 2, 5  # wire types; LEN: strings, messages and packed numbers
_FIXED_BYTES = {I64: 8, I32: 4}
MAX_VARINT_BITS = 64


JSON_MARKS = (b",", b"{", b"[")  # one before each value, and some in strings


@dataclass(slots=True)
class Counted:
    num_fields: int = 0
    num_packed: int = 0  # numbers


def count_fields(data: bytes, kind: Descriptor, limit: int, json_names: frozenset[str] = frozenset()) -> Counted:
    """What the message has, and those in it as far as `kind` knows them. `json_names`: full names of fields of JSON.

    It takes a microsecond for each field, and ends once they are more than `limit`. DecodeError for bytes that are no
    message, and for groups, which proto3 has not.
    """
    found, pending = Counted(), [(0, len(data), kind)]
    while pending and found.num_fields <= limit:
        offset, end, kind = pending.pop()
        inner, packed, json = _inner_messages(kind), _packed(kind), _named(kind, json_names)
        while offset < end and found.num_fields <= limit:
            found.num_fields += 1
            tag, offset = _varint(data, offset)
            start, offset = _value(data, offset, tag & 7)
            if offset > end:
                raise DecodeError("a field is longer than its message")
            if tag & 7 != LEN:
                continue
            if (message := inner.get(tag >> 3)) is not None:
                pending.append((start, offset, message))
            elif tag >> 3 in packed:
                found.num_packed += _num_varints(data, start, offset)
            elif tag >> 3 in json:
                found.num_fields += sum(data.count(mark, start, offset) for mark in JSON_MARKS)
    return found


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
def _inner_messages(kind: Descriptor) -> dict[int, Descriptor]:
    """By field number."""
    return {field.number: field.message_type for field in kind.fields if field.message_type is not None}


@cache
def _packed(kind: Descriptor) -> frozenset[int]:
    """The numbers of its fields of packed varints: our messages to the public have no packed numbers of fixed size."""
    return frozenset(field.number for field in kind.fields if field.is_packed)


@cache
def _named(kind: Descriptor, full_names: frozenset[str]) -> frozenset[int]:
    return frozenset(field.number for field in kind.fields if field.full_name in full_names)
