"""A form as `multipart/form-data` sends it, read piece by piece: of a file no more is held than arrived at once.

python-multipart reads it; here its calls become events, and what it takes but is no form is refused. Pure. Source: RFC
7578, and RFC 2046, section 5.1.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from moonshard.rpc.status import InvalidArgument

MAX_HEADER_BYTES = 1 << 14  # of one of a part's
MAX_PARTS = 32
_FIELD = "content-type"
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{1,70}")


@dataclass(frozen=True, slots=True)
class PartBegun:
    """What follows is of this field. `filename`: None where it is no file."""

    name: str
    filename: str | None


@dataclass(frozen=True, slots=True)
class PartBytes:
    said: bytes


type FormEvent = PartBegun | PartBytes


def boundary_of(content_type: str) -> bytes:
    """InvalidArgument where the body is no form."""
    kind, options = parse_options_header(content_type.encode("latin-1"))
    boundary = options.get(b"boundary", b"").decode("latin-1")
    if kind != b"multipart/form-data" or not boundary:
        raise InvalidArgument("the body must be multipart/form-data, with a boundary", field=_FIELD)
    if not _BOUNDARY.fullmatch(boundary):
        raise InvalidArgument("the boundary is none that RFC 2046 allows", field=_FIELD)
    return boundary.encode()


class FormReader:
    """`pieces` for each part of the body as it arrives, then `finish`. Both raise InvalidArgument for what is no
    form.
    """

    def __init__(self, boundary: bytes) -> None:
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_begin": self._begin_header,
                "on_header_field": lambda data, start, end: self._name.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_head,
                "on_part_data": lambda data, start, end: self._events.append(PartBytes(bytes(data[start:end]))),
                "on_end": self._end,
            },
            max_header_size=MAX_HEADER_BYTES,
        )
        self._events: list[FormEvent] = []
        self._name, self._value = bytearray(), bytearray()  # of a header
        self._disposition = b""
        self._num_parts = 0
        self._has_ended = False

    def pieces(self, arrived: bytes) -> Iterator[FormEvent]:
        try:
            self._parser.write(arrived)
        except FormParserError as error:
            raise InvalidArgument(f"the body is no form: {error}") from error
        events, self._events = self._events, []
        yield from events

    def finish(self) -> None:
        if not self._has_ended:
            raise InvalidArgument("the form ends before its last boundary")

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidArgument(f"the form has more than {MAX_PARTS} parts")
        self._disposition = b""

    def _begin_header(self) -> None:
        self._name.clear()
        self._value.clear()

    def _end_header(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = bytes(self._value)

    def _end_head(self) -> None:
        self._events.append(_begun(self._disposition))

    def _end(self) -> None:
        self._has_ended = True


def _begun(disposition: bytes) -> PartBegun:
    kind, options = parse_options_header(disposition)
    if kind != b"form-data" or b"name" not in options:
        raise InvalidArgument("a part of the form has no name")
    try:
        filename = options.get(b"filename")
        return PartBegun(options[b"name"].decode(), None if filename is None else filename.decode())
    except UnicodeDecodeError as error:
        raise InvalidArgument("a part of the form has a name that is no UTF-8") from error
