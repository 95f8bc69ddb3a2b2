"""The format of a store's two files: a table of headers, and an extent of the payload file for each.

Extents have one size: a block, up to the next multiple of a page. A header says which block its extent has, and how to
know it: by a checksum of its bytes, seeded with its name, so that neither other bytes nor another block's pass for it.
Headers carry a check of their own and never straddle a sector. All that is here is arithmetic on arrays, without a
file: checking and sealing go over a whole table at once.
"""

from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from moonshard.kv.prefix import NAME_BYTES, BlockName
from moonshard.kv.slab import ALIGNMENT_BYTES, Bytes

VERSION = 1
MAGIC = 0x766B736D  # "mskv", in a file
HEADER = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("usage", "u1"),  # how often it was used, in the policy's own code
        ("spare", "u1"),
        ("length", "<u4"),  # of the block, in bytes
        ("check", "<u4"),  # of all the rest of this header
        ("name", f"V{NAME_BYTES}"),
        ("parent", f"V{NAME_BYTES}"),  # the block before it; zeros: the first, or unknown
        ("checksum", "<u8"),
        ("order", "<u8"),  # grows with age's opposite: the lowest is the first to go
    ]
)
HEADER_BYTES = HEADER.itemsize
NO_PARENT = bytes(NAME_BYTES)

Headers = NDArray[Any]  # of HEADER, which types of arrays cannot say

_WORDS = HEADER_BYTES // 8
_CHECK_WORD, _CHECK_MASK = 1, np.uint64(0xFFFFFFFF)  # the word whose upper half is the check
_MULTIPLIERS = np.array([pow(0x9E3779B97F4A7C15, power, 2**64) for power in range(1, _WORDS + 1)], np.uint64)


def no_headers(num: int) -> Headers:
    return np.zeros(num, HEADER)


def block_checksum(name: BlockName, block: Bytes) -> int:
    return xxhash.xxh3_64_intdigest(block.data, seed=xxhash.xxh3_64_intdigest(name))


def seal(headers: Headers) -> None:
    """Writes what says that these headers are headers, and whole."""
    headers["magic"] = MAGIC
    headers["version"] = VERSION
    headers["check"] = _checks(headers)


def are_sound(headers: Headers, block_bytes: int) -> NDArray[np.bool_]:
    """Which of them are whole, and of blocks of that size."""
    is_ours = (headers["magic"] == MAGIC) & (headers["version"] == VERSION) & (headers["length"] == block_bytes)
    return is_ours & (headers["check"] == _checks(headers))


def extent_bytes(block_bytes: int) -> int:
    return -(-block_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def table_bytes(num_extents: int) -> int:
    """Of the file: whole pages."""
    return -(-num_extents * HEADER_BYTES // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def store_bytes(num_extents: int, block_bytes: int) -> int:
    """What so many extents take on the disk, with their headers."""
    return num_extents * extent_bytes(block_bytes) + table_bytes(num_extents)


def num_extents_within(max_bytes: int, block_bytes: int) -> int:
    """How many extents fit, with their headers."""
    num = max_bytes // (extent_bytes(block_bytes) + HEADER_BYTES)
    return num if store_bytes(num, block_bytes) <= max_bytes else num - 1  # the table's last page may be one too many


def _checks(headers: Headers) -> NDArray[np.uint32]:
    """Multiplied and added: any one flipped bit shows. It guards against accidents, not against an attacker."""
    words = headers.view("<u8").reshape(-1, _WORDS).copy()
    words[:, _CHECK_WORD] &= _CHECK_MASK
    return ((words * _MULTIPLIERS).sum(axis=1, dtype=np.uint64) >> np.uint64(32)).astype(np.uint32)
