"""Valid messages of a Link with something in them spoilt: every field there is, in every way its type allows.

Found by walking the messages' descriptors, so that a field that is added is spoilt too.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

INTEGERS = (0, 1, 2, 7, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**31))
LIMITS = {
    Field.CPPTYPE_UINT32: (0, 2**32 - 1),
    Field.CPPTYPE_UINT64: (0, 2**64 - 1),
    Field.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    Field.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
}
FLOATS = (float("nan"), float("inf"), float("-inf"), 0.0, -1.0, 1e-45, 3e38, 86_401.0)
STRINGS = (
    "",
    "\0",
    "\n",
    "x" * 10_000,
    "nobody:1",
    "host:99999",
    "127.0.0.1:1",
    "grpc://127.0.0.1:1/" + "0" * 32,
    "ü:1",
)
BYTES = (b"", b"1" * 15, b"2" * 16, bytes(16), b"3" * 17, b"4" * 32, b"5" * 10_000)
NUM_MANY = 2_000  # of what is repeated: more than anything here has

Place = tuple[tuple[str, int | None], ...]  # names of fields, with an index where one is repeated


def frames(message: Message) -> Iterator[Message]:
    """Each differs from the valid one in one place."""
    for place in places(message):
        _, field = _at(message, place)
        for way in range(num_ways(field)):
            yield spoilt(message, [(place, way)])


def drawn(message: Message, rng: random.Random) -> Message:
    """One that differs in up to three places."""
    known = list(places(message))
    if not known:
        return message
    picked = [rng.choice(known) for _ in range(rng.randint(1, 3))]
    return spoilt(message, [(place, rng.randrange(num_ways(_at(message, place)[1]))) for place in picked])


def places(message: Message) -> Iterator[Place]:
    """Every field of it, set or not, and of the messages in it that are set; of what is repeated, two."""
    for field in message.DESCRIPTOR.fields:
        if field.containing_oneof is not None and not message.HasField(field.name):
            continue  # another kind of message
        yield ((field.name, None),)
        if field.cpp_type == Field.CPPTYPE_MESSAGE:
            yield from _places_in(message, field)


def _places_in(message: Message, field: Any) -> Iterator[Place]:
    value = getattr(message, field.name)
    if not field.is_repeated:
        if message.HasField(field.name):
            yield from (((field.name, None), *rest) for rest in places(value))
        return
    for index in sorted({0, len(value) - 1}) if len(value) else ():
        yield from (((field.name, index), *rest) for rest in places(value[index]))


def _at(message: Message, place: Place) -> tuple[Any, Any]:
    """The message that has the field, and the field."""
    for name, index in place[:-1]:
        message = getattr(message, name)
        if index is not None:
            message = message[index]  # pyright: ignore[reportIndexIssue]  # a list of messages
    return message, message.DESCRIPTOR.fields_by_name[place[-1][0]]


def spoilt(message: Message, ways: Sequence[tuple[Place, int]]) -> Message:
    copy = type(message)()
    copy.CopyFrom(message)
    for place, way in ways:
        try:
            _spoil(*_at(copy, place), way)
        except (IndexError, KeyError):
            continue  # spoilt before: it is not there any more
    return copy


def num_ways(field: Any) -> int:
    single = 2 if field.cpp_type == Field.CPPTYPE_MESSAGE else len(_values(field))
    return single + 4 if field.is_repeated else single


def _spoil(parent: Any, field: Any, way: int) -> None:
    if field.is_repeated:
        _spoil_many(parent, field, way)
    elif field.cpp_type == Field.CPPTYPE_MESSAGE:
        parent.ClearField(field.name)
        if way:
            getattr(parent, field.name).SetInParent()
    else:
        setattr(parent, field.name, _values(field)[way])


def _spoil_many(parent: Any, field: Any, way: int) -> None:
    items, is_message = getattr(parent, field.name), field.cpp_type == Field.CPPTYPE_MESSAGE
    first = items[0] if len(items) else None
    match way:
        case 0:
            parent.ClearField(field.name)
        case 1:
            items.extend([items.add() if is_message else _values(field)[1]] if first is None else [first])
        case 2:
            items.extend([type(first)() if is_message else _values(field)[1]] * NUM_MANY if first is not None else [])
        case 3:
            del items[-1:]
        case _ if is_message:
            items.add()
        case _:
            value = _values(field)[way - 4]
            items.append(value) if first is None else items.__setitem__(0, value)


def _values(field: Any) -> tuple[Any, ...]:
    match field.cpp_type:
        case Field.CPPTYPE_DOUBLE | Field.CPPTYPE_FLOAT:
            return FLOATS
        case Field.CPPTYPE_BOOL:
            return (False, True)
        case Field.CPPTYPE_STRING:
            return BYTES if field.type == Field.TYPE_BYTES else STRINGS
        case kind:
            low, high = LIMITS[kind]
            return tuple(value for value in INTEGERS if low <= value <= high)
