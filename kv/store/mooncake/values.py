"""What is stored for a block: its bytes, and a trailer by which wrong ones are known."""

import struct
from collections.abc import Sequence

import numpy as np
import xxhash

from moonshard.kv.prefix import BlockName
from moonshard.kv.slab import Bytes
from moonshard.kv.store.mooncake.library import BAD_PARAMETERS, NOT_FOUND
from moonshard.kv.store.tier import MissCause

MAGIC = b"moonKV\x00\x01"  # the last byte is the version
TRAILER = struct.Struct("<8sQQ")  # the magic, the block's bytes, their checksum


class Values:
    """What is stored: a block's bytes and a trailer that no other bytes, block or layout have."""

    def __init__(self, layout: bytes, block_bytes: int):
        self._layout = layout
        self._block_bytes = block_bytes
        self.num_bytes = block_bytes + TRAILER.size

    def keys(self, names: Sequence[BlockName]) -> list[str]:
        return [f"{self._layout.hex()}-{name.hex()}" for name in names]

    def write(self, name: BlockName, block: Bytes, row: Bytes) -> None:
        row[: self._block_bytes] = block
        row[self._block_bytes : self.num_bytes] = np.frombuffer(self._trailer(name, block), np.uint8)

    def read(self, name: BlockName, code: int, row: Bytes, out: Bytes) -> MissCause | None:
        """Copies a block out of a row that may still be written to, and says what is wrong with the copy, if anything.

        `code` is the length that came, or the library's negative one.
        """
        if code != self.num_bytes:
            known = {NOT_FOUND: MissCause.ABSENT, BAD_PARAMETERS: MissCause.WRONG_LENGTH}
            return known.get(code, MissCause.WRONG_LENGTH if code >= 0 else MissCause.IO_ERROR)
        out[:] = row[: self._block_bytes]
        is_good = row[self._block_bytes : self.num_bytes].tobytes() == self._trailer(name, out)
        return None if is_good else MissCause.CORRUPT

    def _trailer(self, name: BlockName, block: Bytes) -> bytes:
        seed = xxhash.xxh3_64_intdigest(self._layout + name)
        checksum = xxhash.xxh3_64_intdigest(np.ascontiguousarray(block), seed)
        return TRAILER.pack(MAGIC, self._block_bytes, checksum)
