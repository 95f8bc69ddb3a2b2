"""INT4 as compressed-tensors packs it (`pack-quantized`), in groups of 32 along a row: what Kimi K2.5's experts are in.

Eight codes lie in an int32, the first in its lowest bits; the code 0 is -8. Source: compressed-tensors'
`pack_quantized` compressor and its `decompress`, whose product is rounded to bfloat16.
"""

from typing import Any

import numpy as np

from moonshard.models.formats.format import BF16, Format, Stored

CODES_PER_WORD, ZERO = 8, 8


def _decode(words: Any) -> Any:
    shifts = np.arange(CODES_PER_WORD, dtype=np.int32) * 4
    codes = ((words[..., None] >> shifts) & 15) - ZERO  # what an arithmetic shift fills in at the top is cut off
    return codes.reshape(*words.shape[:-1], -1).astype(np.float32)


def _encode(scaled: np.ndarray) -> np.ndarray:
    codes = np.clip(np.rint(scaled), -ZERO, ZERO - 1).astype(np.int8) + np.int8(ZERO)
    missing = -codes.shape[-1] % CODES_PER_WORD
    nibbles = np.pad(codes, [(0, 0), (0, missing)], constant_values=ZERO).astype(np.uint8)
    return (nibbles[:, ::2] | nibbles[:, 1::2] << 4).view("<i4")


INT4 = Format(
    name="int4",
    values=Stored(suffix="weight_packed", spelling="I32", dtype=np.dtype(np.int32)),
    scales=Stored(suffix="weight_scale", spelling="BF16", dtype=BF16),
    rows=1,
    columns=32,
    codes_per_item=CODES_PER_WORD,
    largest_code=7.5,
    value_dtype=BF16,
    decode=_decode,
    encode=_encode,
    has_nan=lambda words: False,
)
