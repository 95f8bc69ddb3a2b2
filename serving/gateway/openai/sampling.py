"""The table's sampling parameters as fields of a body. Bodies build on it."""

import msgspec

from moonshard.serving.control.sampling_parameters import PARAMETERS

type Number = int | float

SamplingBody = msgspec.defstruct(
    "SamplingBody",
    [(each.name, (Number if each.is_integer else float) | None, None) for each in PARAMETERS],
    kw_only=True,
)
