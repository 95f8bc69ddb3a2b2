"""How long a step takes: a few coefficients for each kind, for a simulator to stand on. Pure.

A step computes the rows of its bucket, padding too: tokens of a prefill, sequences of a decode. Dense layers and
experts take so long for each row. Attention takes so long for each pair of a row and a token of its context; a row of
padding counts as many as any other. A record of steps knows the sum of its sequences' contexts, and so each row is
taken to have their mean. The coefficients are found in `step_fit`. Waiting for a step is not modelled.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

type Coefficient = Annotated[float, Meta(ge=0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """The coefficients of one kind of step on one kind of device."""

    fixed_ms: Coefficient  # of every step
    row_us: Coefficient  # of each row of the bucket
    pair_ns: Coefficient  # of each pair of a row and a token of its context

    def ms(self, *, bucket: int, batch: int, context_tokens: int) -> float:
        """The device's time for one step.

        Args:
            bucket: padded size: tokens of a prefill, sequences of a decode.
            batch: sequences in it, at least 1.
            context_tokens: that they have afterwards, together.
        """
        return self.fixed_ms + self.row_us * bucket / 1e3 + self.pair_ns * bucket * context_tokens / batch / 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class StepModel:
    """The coefficients of both kinds, and on what machine they were measured."""

    prefill: StepTimes
    decode: StepTimes
    source: str = ""  # which run, machine and model

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode() + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> "StepModel":
        """Reads what `to_json` wrote. ValueError naming the field for anything else."""
        return msgspec.json.decode(text, type=cls)
