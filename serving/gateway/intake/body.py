"""A body as it grows, kept in pieces.

In one buffer a body of 32 MB would be copied again and again, while every stream waits.
"""

import asyncio
from collections.abc import Callable

PIECE_BYTES = 64 * 1024
AT_ONCE_BYTES = 1 << 20  # joining so much takes well below a millisecond


class Body:
    """`admit` is told how many bytes there are before more are kept, and raises where that is too many."""

    def __init__(self, admit: Callable[[int], None]) -> None:
        self._admit = admit
        self._pieces: list[bytes] = []
        self._last = bytearray()  # small parts would cost more as objects than as bytes
        self._num_bytes = 0

    def add(self, part: bytes) -> None:
        self._num_bytes += len(part)
        self._admit(self._num_bytes)
        self._last += part
        if len(self._last) >= PIECE_BYTES:
            self._end_piece()

    async def whole(self) -> bytes:
        """The joined body; to be asked for once. A large one is joined on a thread, which does not hold Python's lock
        meanwhile.
        """
        self._end_piece()
        pieces, self._pieces = self._pieces, []
        if self._num_bytes <= AT_ONCE_BYTES:
            return b"".join(pieces)
        return await asyncio.to_thread(b"".join, pieces)

    def _end_piece(self) -> None:
        self._pieces.append(bytes(self._last))
        self._last.clear()
