"""The lines of a batch's input file: which can be run, and what is wrong with the others.

A line that is broken costs the others nothing: it is a row of the error file. What its body asks is checked when it is
run, by the route that it names. Pure but for reading the file. Source: OpenAI's API reference, "Batch", the request
input object.
"""

from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from moonshard.serving.gateway.batches.records import CheckedLine, LineError, PendingLine
from moonshard.serving.gateway.batches.rows import broken_row

MAX_LINES = 50_000  # OpenAI's
MAX_CUSTOM_ID_CHARS = 512
OTHER_BYTES = 1 << 16  # of a line besides its body
_BOM = b"\xef\xbb\xbf"


class Line(msgspec.Struct, kw_only=True):
    """A line's fields; what else it has is passed over."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Streamed(msgspec.Struct):
    stream: bool | None = None


class _Named(msgspec.Struct):
    custom_id: str


class BrokenLine(ValueError):
    """A line that cannot be run, and the id that it has for its client, if it has one."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.custom_id = custom_id


class TooManyLines(ValueError):
    """More than MAX_LINES."""


_LINE = msgspec.json.Decoder(Line)
_CUSTOM_ID = msgspec.json.Decoder(_Named)
_STREAMED = msgspec.json.Decoder(_Streamed)


def read_line(said: bytes, endpoint: str) -> Line:
    """Raises BrokenLine."""
    try:
        line = _LINE.decode(said)
    except msgspec.ValidationError as error:
        raise BrokenLine("missing_required_parameter", str(error), _custom_id(said)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BrokenLine("invalid_json_line", f"the line is not valid JSON: {error}") from error
    problem = _problem(line, endpoint)
    if problem is not None:
        raise BrokenLine(*problem, line.custom_id[:MAX_CUSTOM_ID_CHARS])
    return line


def checked_lines(file: BinaryIO, endpoint: str, max_line_bytes: int) -> Iterator[tuple[CheckedLine, LineError | None]]:
    """Each line that is not blank, and what is wrong with it. Raises TooManyLines. At most one line is in memory."""
    seen: set[str] = set()
    for number, start, said in _lines(file, max_line_bytes):
        if len(seen) > MAX_LINES or number > 2 * MAX_LINES:
            raise TooManyLines
        place = PendingLine(number=number, start=start, num_bytes=len(said))
        try:
            if len(said) > max_line_bytes:
                raise BrokenLine("line_too_long", f"the line has more than {max_line_bytes} bytes")
            line = read_line(said, endpoint)
            if line.custom_id in seen:
                raise BrokenLine("duplicate_custom_id", "custom_id: an earlier line has the same", line.custom_id)
            seen.add(line.custom_id)
        except BrokenLine as broken:
            error = LineError(code=broken.code, message=broken.message, line=number)
            yield CheckedLine(place, broken_row(broken.custom_id, error)), error
        else:
            yield CheckedLine(place), None


def _lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """(number, start, bytes) of each that is not blank; of one that is too long, the first `max_bytes` and one more."""
    number, start = 0, 0
    while said := file.readline(max_bytes + 2):
        number += 1
        kept, num_read = said[: max_bytes + 1], len(said)
        while not said.endswith(b"\n") and (said := file.readline(1 << 20)):
            num_read += len(said)
        text = kept.rstrip(b"\r\n")
        skipped = len(_BOM) if number == 1 and text.startswith(_BOM) else 0
        if text[skipped:].strip():
            yield number, start + skipped, text[skipped:]
        start += num_read


def _problem(line: Line, endpoint: str) -> tuple[str, str] | None:
    """The code and the message of what is wrong with a line's fields."""
    if not line.custom_id:
        return "missing_required_parameter", "custom_id: is empty"
    if len(line.custom_id) > MAX_CUSTOM_ID_CHARS:
        return "invalid_custom_id", f"custom_id: at most {MAX_CUSTOM_ID_CHARS} characters, not {len(line.custom_id)}"
    if line.method != "POST":
        return "invalid_method", "method: must be POST"
    if line.url != endpoint:
        return "mismatched_endpoint", f"url: must be the batch's endpoint, {endpoint}"
    if memoryview(line.body)[:1].tobytes() != b"{":
        return "invalid_body", "body: must be an object"
    try:
        if _STREAMED.decode(line.body).stream:
            return "invalid_body", "body.stream: nobody listens to a batch's streams"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # the route says what is wrong with it
    return None


def _custom_id(said: bytes) -> str | None:
    try:
        return _CUSTOM_ID.decode(said).custom_id[:MAX_CUSTOM_ID_CHARS]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
