"""A form as `multipart/form-data` sends it, read piece by piece: of a file no more is held than arrived at once.

Pure. Source: RFC 7578, and RFC 2046, section 5.1.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message

from moonshard.rpc.status import InvalidArgument

MAX_HEAD_BYTES = 1 << 14  # of one part
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
    head = _parsed(f"content-type: {content_type}")
    boundary = head.get_param("boundary")
    if head.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
        raise InvalidArgument("the body must be multipart/form-data, with a boundary", field=_FIELD)
    if not _BOUNDARY.fullmatch(boundary):
        raise InvalidArgument("the boundary is none that RFC 2046 allows", field=_FIELD)
    return boundary.encode()


class FormReader:
    """`pieces` for each part of the body as it arrives, then `finish`. Both raise InvalidArgument for what is no
    form.
    """

    def __init__(self, boundary: bytes) -> None:
        self._mark = b"\r\n--" + boundary
        self._held = b"\r\n"  # so that the first mark is like all others
        self._state = "before"
        self._num_parts = 0

    def pieces(self, arrived: bytes) -> Iterator[FormEvent]:
        self._held += arrived
        while (step := self._step()) is not None:
            yield from step

    def finish(self) -> None:
        if self._state != "after":
            raise InvalidArgument("the form ends before its last boundary")

    def _step(self) -> tuple[FormEvent, ...] | None:
        """What the held bytes hold next; None where more must come first."""
        match self._state:
            case "before" | "bytes":
                return self._until_mark()
            case "mark":
                return self._after_mark()
            case "head":
                return self._head()
            case _:
                self._held = b""  # what follows the last boundary means nothing
                return None

    def _until_mark(self) -> tuple[FormEvent, ...] | None:
        found = self._held.find(self._mark)
        is_found = found >= 0
        end = found if is_found else len(self._held) - len(self._mark) + 1  # the rest may be a mark's beginning
        if end < 0 or (not is_found and end == 0):
            return None
        said, self._held = self._held[:end], self._held[end + len(self._mark) if is_found else end :]
        events = (PartBytes(said),) if said and self._state == "bytes" else ()
        if is_found:
            self._state = "mark"
        return events

    def _after_mark(self) -> tuple[FormEvent, ...] | None:
        if len(self._held) < 2:
            return None
        if self._held.startswith(b"--"):
            self._state = "after"
            return ()
        line, found, rest = self._held.partition(b"\r\n")
        if not found and len(self._held) <= MAX_HEAD_BYTES:
            return None
        if not found or line.strip(b" \t"):
            raise InvalidArgument("a boundary of the form is not alone in its line")
        self._state, self._held = "head", b"\r\n" + rest  # a head may be empty
        return ()

    def _head(self) -> tuple[FormEvent, ...] | None:
        head, found, rest = self._held.partition(b"\r\n\r\n")
        if len(head) > MAX_HEAD_BYTES:
            raise InvalidArgument(f"a part of the form has a head of more than {MAX_HEAD_BYTES} bytes")
        if not found:
            return None
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidArgument(f"the form has more than {MAX_PARTS} parts")
        self._state, self._held = "bytes", rest
        return (_begun(head),)


def _begun(head: bytes) -> PartBegun:
    try:
        lines = head.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument("a part of the form has a head that is no UTF-8") from error
    said = next((line for line in lines.split("\r\n") if line.lower().startswith("content-disposition:")), "")
    parsed = _parsed(said)
    name = parsed.get_param("name", header="content-disposition")
    if parsed.get_content_disposition() != "form-data" or not isinstance(name, str):
        raise InvalidArgument("a part of the form has no name")
    filename = parsed.get_filename()
    return PartBegun(name, filename)


def _parsed(line: str) -> Message:
    """A header's line, for its parameters."""
    name, _, value = line.partition(":")
    found = Message()
    if name:
        found[name] = value.strip().replace("\r", " ").replace("\n", " ")
    return found
