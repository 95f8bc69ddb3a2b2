"""FP8 (E4M3FN) with a float32 scale to every block of 128 x 128: what DeepSeek-V3 and Kimi K2 are in.

The scales are factors, whatever `inv` in their name says. Source: DeepSeek-V3 (arXiv 2412.19437), section 3.3, and
`weight_dequant` of its inference code.
"""

import ml_dtypes
import numpy as np

from moonshard.models.formats.format import F32, Format, Stored

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = 448.0
NAN = 0x7F  # and with the sign


def _has_nan(codes: np.ndarray) -> bool:
    return bool((codes.view(np.uint8) & NAN == NAN).any())


FP8 = Format(
    name="fp8",
    values=Stored(suffix="weight", spelling="F8_E4M3", dtype=E4M3),
    scales=Stored(suffix="weight_scale_inv", spelling="F32", dtype=F32),
    rows=128,
    columns=128,
    codes_per_item=1,
    largest_code=LARGEST,
    value_dtype=F32,
    decode=lambda codes: codes.astype(np.float32),
    encode=lambda scaled: np.clip(scaled, -LARGEST, LARGEST).astype(E4M3),
    has_nan=_has_nan,
)
