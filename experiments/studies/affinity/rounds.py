"""What an arm's clients saw, turn by turn, and what its prefill workers computed: what figures are worked out from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moonshard.experiments.studies.sessions import Turn

ArmName = Literal["random", "header", "cost", "dropped", "kept"]
ARM_NAMES: Sequence[ArmName] = ("random", "header", "cost")
THOUGHT_ARMS: Sequence[ArmName] = ("dropped", "kept")  # other prompts of the same conversations: of a model that thinks


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One round of one arm: its turns in the order of sending, and what each prefill worker computed."""

    arm: ArmName
    number: int
    turns: Sequence[Turn]
    computed_tokens: Mapping[str, float]
