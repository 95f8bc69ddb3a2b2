"""JSON to a body's struct, and msgspec's errors as the parameter at fault.

Apart from the bodies, since the parts of one are decoded on their own too.
"""

import re

import msgspec

from moonshard.rpc.status import InvalidArgument

_FIELD = re.compile(r"unknown field `(?P<unknown>[^`]*)`|required field `(?P<missing>[^`]*)`")
_PATH = re.compile(r"`\$(?:\.(?P<path>[^`]+))?`")


def decode[T](decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """InvalidArgument with the parameter's name, where one is at fault."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise shape_error(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidArgument("the body is nested too deeply") from error


def shape_error(error: msgspec.ValidationError) -> InvalidArgument:
    return InvalidArgument(str(error), field=_field_of(str(error)))


def _field_of(message: str) -> str | None:
    """The parameter that a msgspec error speaks of: `$.a[0].b` and an unknown or missing field of it."""
    path = match["path"] if (match := _PATH.search(message)) else None
    field = (match["unknown"] or match["missing"]) if (match := _FIELD.search(message)) else None
    return ".".join(part for part in (path, field) if part) or None
