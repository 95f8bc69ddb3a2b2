"""How many fields an encoded message has, read off its bytes before anything is made of it.

A field of two bytes may be a message of its own: 8 MB of them take a second to parse and a hundred times their size to
hold. Tags and lengths alone tell how many there are. Packed numbers are one field: they cost what their bytes say.
Source: Protocol Buffers, "Encoding".
"""

from functools import cache

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

SMALL_BYTES = 1 << 12  # a message that short has few
VARINT, I64, LEN, I32 = 0, 1, 2, 5  # wire types; LEN: strings, messages and packed numbers
_FIXED_BYTES = {I64: 8, I32: 4}
MAX_VARINT_BITS = 64


def has_more_fields(data: bytes, kind: Descriptor, limit: int) -> bool:
    """Whether the message, and those in it as far as `kind` knows them, have more than `limit` fields in all.

    It takes a microsecond for each, and ends once there are too many. DecodeError for bytes that are no message, and
    for groups, which proto3 has not.
    """
    return len(data) > SMALL_BYTES and _num_fields(data, kind, limit) > limit


def _num_fields(data: bytes, kind: Descriptor, limit: int) -> int:
    num, pending = 0, [(0, len(data), kind)]
    while pending and num <= limit:
        offset, end, kind = pending.pop()
        inner = _inner_messages(kind)
        while offset < end and num <= limit:
            num += 1
            tag, offset = _varint(data, offset)
            start, offset = _value(data, offset, tag & 7)
            if offset > end:
                raise DecodeError("a field is longer than its message")
            message = inner.get(tag >> 3)
            if message is not None and tag & 7 == LEN:
                pending.append((start, offset, message))
    return num


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
