"""JSON to a body's struct, msgspec's errors as the parameter at fault, and numbers as JSON has them.

The bodies are in `requests`. Parts of one are decoded on their own too, with the same functions.
"""

import re
from collections.abc import Sequence
from itertools import islice

import msgspec

from moonshard.rpc.status import InvalidArgument
from moonshard.serving.gateway.intake.unknown_fields import unknown_fields

_FIELD = re.compile(r"required field `(?P<missing>[^`]*)`")
_PATH = re.compile(r"`\$(?:\.(?P<path>[^`]+))?`")
MAX_NO_OP_BYTES = 256  # of a value that may ask for nothing; what is longer asks for something
MAX_UNKNOWN = 64  # names are told, not counted
ABSENT = msgspec.Raw()


def decode[T](decoder: msgspec.json.Decoder[T], body: bytes | msgspec.Raw) -> T:
    """InvalidArgument with the parameter's name, where one is at fault."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise shape_error(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidArgument("the body is nested too deeply") from error


class BodyDecoder[T: msgspec.Struct]:
    """Decodes JSON to one struct, and finds the fields that the struct does not have."""

    def __init__(self, struct: type[T]) -> None:
        self.struct = struct
        self._decoder = msgspec.json.Decoder(struct)

    def decode(self, body: bytes) -> tuple[T, list[str]]:
        """InvalidArgument as `decode`. Of many names, the first `MAX_UNKNOWN`."""
        found = decode(self._decoder, body)
        try:
            return found, list(islice(unknown_fields(self.struct, body), MAX_UNKNOWN))
        except UnicodeDecodeError as error:  # in a field that nobody knows, or in its name
            raise InvalidArgument(f"the body is not valid JSON: {error}") from error
        except RecursionError as error:
            raise InvalidArgument("the body is nested too deeply") from error


def shape_error(error: msgspec.ValidationError) -> InvalidArgument:
    return InvalidArgument(str(error), field=_field_of(str(error)))


def is_nothing(value: msgspec.Raw, accepted: Sequence[object] = ()) -> bool:
    """Whether the value is absent, null or one of those. Of a long value nothing is built to find that out."""
    raw = memoryview(value)
    if not raw:
        return True
    if len(raw) > MAX_NO_OP_BYTES:
        return False
    try:
        said = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False  # whatever it is, it is something: it is refused by its name
    return said is None or any(_is_same(said, other) for other in accepted)


def whole(name: str, value: float) -> int:
    """An integer, however it is written: JSON tells 3 and 3.0 apart no more than JavaScript does."""
    if isinstance(value, int):
        return value
    if not value.is_integer():
        raise InvalidArgument(f"{name}: must be an integer, not {value}", field=name)
    return int(value)


def whole_list(name: str, values: Sequence[float]) -> Sequence[int]:
    """As `whole`, for each of a list; a list of integers is returned as it is."""
    if float not in set(map(type, values)):
        return values  # pyright: ignore[reportReturnType]  # all of them are integers
    return [whole(f"{name}[{index}]", value) for index, value in enumerate(values)]


def _is_same(value: object, other: object) -> bool:
    """Equality as JSON has it, where 1 is not true and 0 not false."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _field_of(message: str) -> str | None:
    """The parameter that a msgspec error is about, from its path (`$.a[0].b`) or from the name of a missing field."""
    path = match["path"] if (match := _PATH.search(message)) else None
    field = match["missing"] if (match := _FIELD.search(message)) else None
    return ".".join(part for part in (path, field) if part) or None
