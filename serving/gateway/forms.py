"""The form that an answer is to keep to, as either front asks for it: at most one, of five kinds.

What each kind means is `serving.constrained.parts`'.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from moonshard.rpc.status import InvalidArgument
from moonshard.serving.constrained.parts import (
    Part,
    PartError,
    choice_part,
    json_part,
    lark_part,
    object_part,
    regex_part,
)

_SCHEMA = msgspec.json.Decoder(dict[str, object])


@contextmanager
def part_errors() -> Iterator[None]:
    """Raises what can be no grammar as InvalidArgument."""
    try:
        yield
    except PartError as error:
        raise InvalidArgument(f"{error.field}: {error}", field=error.field) from error


def read_form(asked: Sequence[tuple[str, str, Any]]) -> Part | None:
    """The form of (kind, what the client calls it, value); None where nothing is asked.

    InvalidArgument where there are several, and for a value that can be no grammar.
    """
    if not asked:
        return None
    kind, name, value = asked[0]
    if len(asked) > 1:
        raise not_together(asked[1][1], name)
    with part_errors():
        return _KINDS[kind](value, name)


def not_together(name: str, other: str) -> InvalidArgument:
    return InvalidArgument(f"{name}: an answer cannot keep to it and to {other} at once", field=name)


def _json(schema: Mapping[str, object] | str, name: str) -> Part:
    """Of a schema that may be a text."""
    if not isinstance(schema, str):
        return json_part(schema, name)
    try:
        return json_part(_SCHEMA.decode(schema), name)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PartError(name, f"expected a JSON object: {error}") from error


_KINDS: Mapping[str, Callable[[Any, str], Part]] = {
    "json": _json,
    "json_object": lambda _, name: object_part(name),
    "regex": regex_part,
    "choice": choice_part,
    "grammar": lark_part,
}
