"""Headers show any flipped bit, checksums know their block, and limits are used up and held."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moonshard.kv.store.ssd.extents import (
    HEADER,
    HEADER_BYTES,
    are_sound,
    block_checksum,
    extent_bytes,
    no_headers,
    num_extents_within,
    seal,
    store_bytes,
)

BLOCK_BYTES = 5000


def some_headers(num: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    headers = no_headers(num)
    headers.view(np.uint8)[:] = rng.integers(0, 256, num * HEADER_BYTES)
    headers["length"] = BLOCK_BYTES
    seal(headers)
    return headers


def test_a_header_lies_in_one_sector():
    assert 512 % HEADER_BYTES == 0
    assert sum(HEADER[name].itemsize for name in HEADER.names or ()) == HEADER_BYTES  # no bytes between


@given(st.integers(0, 2**32))
def test_any_flipped_bit_of_a_header_shows(seed: int):
    headers = np.repeat(some_headers(1, seed), 8 * HEADER_BYTES)
    assert are_sound(headers, BLOCK_BYTES).all()
    bits = headers.view(np.uint8).reshape(len(headers), HEADER_BYTES)
    for bit in range(8 * HEADER_BYTES):
        bits[bit, bit // 8] ^= 1 << bit % 8
    assert not are_sound(headers, BLOCK_BYTES).any()


def test_headers_of_other_blocks_or_of_nothing_are_not_sound():
    assert not are_sound(no_headers(3), 0).any()
    assert not are_sound(some_headers(3), BLOCK_BYTES + 1).any()
    other = some_headers(3)
    other["version"] += 1
    assert not are_sound(other, BLOCK_BYTES).any()


def test_a_checksum_is_of_the_bytes_and_of_all_of_the_name():
    block, name = np.arange(100, dtype=np.uint8), bytes(range(16))
    known = {block_checksum(name, block)}
    for bit in range(8 * 16):
        flipped = bytearray(name)
        flipped[bit // 8] ^= 1 << bit % 8
        known.add(block_checksum(bytes(flipped), block))
    for bit in range(8 * 100):
        other = block.copy()
        other[bit // 8] ^= 1 << bit % 8
        known.add(block_checksum(name, other))
    known |= {block_checksum(name, block[:99]), block_checksum(name, np.append(block, np.uint8(0)))}
    assert len(known) == 1 + 8 * 16 + 8 * 100 + 2


@given(st.integers(0, 10**7), st.integers(1, 20_000))
def test_a_limit_is_used_up_and_held(max_bytes: int, block_bytes: int):
    num = num_extents_within(max_bytes, block_bytes)
    assert store_bytes(num, block_bytes) <= max_bytes < store_bytes(num + 1, block_bytes)
    assert block_bytes <= extent_bytes(block_bytes) < block_bytes + 4096
    assert extent_bytes(block_bytes) % 4096 == 0
