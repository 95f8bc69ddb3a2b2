"""A body as it grows, in pieces: one buffer of 32 MB would be copied again and again, while every stream waits."""

import asyncio

from moonshard.rpc.status import TooLarge

PIECE_BYTES = 64 * 1024
AT_ONCE_BYTES = 1 << 20  # joining so much takes well below a millisecond


class Body:
    """Of at most `max_bytes`: TooLarge as soon as there are more."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []
        self._last = bytearray()  # small parts would cost more as objects than as bytes
        self._num_bytes = 0

    def add(self, part: bytes) -> None:
        self._num_bytes += len(part)
        check_size(self._num_bytes, self._max_bytes)
        self._last += part
        if len(self._last) >= PIECE_BYTES:
            self._end_piece()

    async def whole(self) -> bytes:
        """To be asked for once. A large one is joined by a thread, which holds no lock of Python's meanwhile."""
        self._end_piece()
        pieces, self._pieces = self._pieces, []
        if self._num_bytes <= AT_ONCE_BYTES:
            return b"".join(pieces)
        return await asyncio.to_thread(b"".join, pieces)

    def _end_piece(self) -> None:
        self._pieces.append(bytes(self._last))
        self._last.clear()


def check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise TooLarge(f"the body has more than the {max_bytes} bytes that gateway.max_body_bytes allows")
