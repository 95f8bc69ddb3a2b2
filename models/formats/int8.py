"""INT8 of weights alone, symmetric, a float32 scale to every row: what `model.weights = "int8"` makes of any other.

In a folder it has the names of compressed-tensors' channel-wise `int-quantized`.
"""

import numpy as np

from moonshard.models.formats.format import F32, Format, Stored

LARGEST = 127.0

INT8 = Format(
    name="int8",
    values=Stored(suffix="weight", spelling="I8", dtype=np.dtype(np.int8)),
    scales=Stored(suffix="weight_scale", spelling="F32", dtype=F32),
    rows=1,
    columns=None,
    codes_per_item=1,
    largest_code=LARGEST,
    value_dtype=F32,
    decode=lambda codes: codes.astype(np.float32),
    encode=lambda scaled: np.clip(np.rint(scaled), -LARGEST, LARGEST).astype(np.int8),
    has_nan=lambda codes: False,
)
