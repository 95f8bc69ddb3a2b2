"""Bodies that were compressed on the way, given out in pieces: whoever takes them can stop at any of them.

A few bytes may stand for gigabytes, so nothing is inflated before the piece before it was taken. Taken are gzip and
deflate, which Python 3.12 reads; it does not read zstd, for which a library more would be needed. Pure.
Source: RFC 9110, section 8.4.1; RFC 1950 to 1952.
"""

import zlib
from collections.abc import Iterator, Sequence

from moonshard.rpc.status import InvalidArgument, UnsupportedEncoding

ACCEPTED = "gzip, deflate, identity"
PIECE_BYTES = 64 * 1024  # takes some 0.2 ms
MAX_MEMBERS = 1024  # of a gzip body: each costs as much as a piece, even where it is empty
_FIELD = "content-encoding"
_NAMES = {"": "identity", "x-gzip": "gzip"}
_GZIP = 16 + zlib.MAX_WBITS
_RAW = -zlib.MAX_WBITS
_HEADER_BYTES = 2  # of zlib's form, which many leave out where `deflate` asks for it


class Inflater:
    """One body's. `pieces` for each part as it arrives, then `finish`: both raise InvalidArgument for a damaged one."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._begin = b""  # of a deflated body, until it shows its form
        self._stream = None if encoding == "deflate" else zlib.decompressobj(_GZIP)
        self._num_members = 1

    def pieces(self, part: bytes) -> Iterator[bytes]:
        """What the part holds, each piece of at most PIECE_BYTES; some may be empty."""
        if self._stream is None:
            self._begin += part
            if len(self._begin) < _HEADER_BYTES:
                return
            part, self._stream = self._begin, zlib.decompressobj(_deflate_form(self._begin))
        stream, piece = self._stream, b""
        while part or len(piece) == PIECE_BYTES:  # a full piece may have left something behind
            if stream.eof:
                self._stream = stream = self._next_member()
            try:
                piece = stream.decompress(part, PIECE_BYTES)
            except zlib.error as error:
                raise InvalidArgument(f"the body is not valid {self._encoding}: {error}", field=_FIELD) from error
            yield piece
            part, piece = (stream.unused_data, b"") if stream.eof else (stream.unconsumed_tail, piece)

    def finish(self) -> None:
        if self._stream is None or not self._stream.eof:
            raise InvalidArgument(f"the body ends before its {self._encoding} data does", field=_FIELD)

    def _next_member(self) -> "zlib._Decompress":
        if self._encoding != "gzip":
            raise InvalidArgument(f"the body goes on after its {self._encoding} data", field=_FIELD)
        self._num_members += 1
        if self._num_members > MAX_MEMBERS:
            raise InvalidArgument(f"the body has more than {MAX_MEMBERS} gzip members", field=_FIELD)
        return zlib.decompressobj(_GZIP)


def encoding_of(headers: Sequence[str]) -> str:
    """`gzip`, `deflate` or `identity`, by the values of Content-Encoding. UnsupportedEncoding for all else."""
    named = [name.strip().lower() for value in headers for name in value.split(",")]
    encodings = [encoding for encoding in (_NAMES.get(name, name) for name in named) if encoding != "identity"]
    if not encodings:
        return "identity"
    if len(encodings) > 1 or encodings[0] not in ("gzip", "deflate"):
        said = ", ".join(encodings)[:100]
        raise UnsupportedEncoding(f"a body in {said!r} is not read here, only one of {ACCEPTED}", field=_FIELD)
    return encodings[0]


def _deflate_form(begin: bytes) -> int:
    is_zlib = begin[0] & 0x0F == zlib.DEFLATED and int.from_bytes(begin[:_HEADER_BYTES]) % 31 == 0
    return zlib.MAX_WBITS if is_zlib else _RAW
