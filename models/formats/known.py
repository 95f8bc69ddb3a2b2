"""The formats by name."""

from collections.abc import Mapping

from moonshard.models.formats.format import Format
from moonshard.models.formats.fp8 import FP8
from moonshard.models.formats.int4 import INT4
from moonshard.models.formats.int8 import INT8

FORMATS: Mapping[str, Format] = {each.name: each for each in (INT4, FP8, INT8)}
