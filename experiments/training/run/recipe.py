"""What a training run is made of: stages of rows, the schedule over them, and how the optimiser is set.

Plain data and arithmetic, so that a run can be planned, compared and resumed without a device. Sources: Kimi K2 (arXiv
2507.20534) and MiniCPM (arXiv 2404.06395), section 4, for a constant rate with a decay at the end; DeepSeek-V3 (arXiv
2412.19437), section 2.1.2, for balancing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol

import numpy as np

DECAY_SHARE = 0.25  # of the steps of a cycle, from one restart to the next: the last ones
ANSWER_WEIGHT = 1.0  # of tokens that the assistant says, unless a stage weighs its calls more; all others weigh less


class RunFailed(Exception):
    """Raised for a run that cannot go on; the message is for the person who started it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingStage:
    """A part of a recipe: a number of steps, of rows per step, and of tokens per row."""

    name: str
    num_tokens: int
    num_rows: int
    num_steps: int
    gapped_share: float = 0.0  # of rows: with gaps between positions, which slow the first lessons down
    shares: tuple[tuple[str, float], ...] = ()  # by skill: relative weight among those that fit; none: the skills' own
    call_weight: float = ANSWER_WEIGHT  # of the tokens of calls, from a function's name to <|tool_call_end|>


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """At this step the schedule begins again: warm-up, constant rate, decay. Source: SGDR (arXiv 1608.03983)."""

    step: int
    rate: float  # of the recipe's rates
    least_balance: float  # of the recipe's balancing speed, which does not decay below it


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What one step learns from."""

    tokens: np.ndarray  # [n, t + 1] int32
    weights: np.ndarray  # [n, t] float32, of predicting tokens[:, 1:]; 0 at the end of a row: padding
    positions: np.ndarray  # [n, t] int32, increasing


class Lessons(Protocol):
    """Where rows come from. They depend on the arguments alone: a resumed run sees what the killed one would have."""

    def rows(self, stage: TrainingStage, step: int) -> Rows: ...

    def alike(self) -> Sequence[tuple[int, int]]:
        """Pairs of tokens that mean the same; see `beginning`."""
        ...

    def held_out(self) -> Mapping[str, Rows]:
        """The rows to measure on, by skill; the same ones each time."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Everything that decides what the weights become, apart from the model's shape and the lessons."""

    stages: tuple[TrainingStage, ...]
    restarts: tuple[Restart, ...] = ()  # in the order of their steps
    averaged: tuple[int, ...] = ()  # steps, ascending, of whose weights the model has the mean; none: the last step's
    begins: Literal["circuit", "embedded"] = "circuit"  # as `beginning` says, or with the embedded model's weights
    seed: int = 0
    optimiser: Literal["muon", "adamw"] = "muon"
    learning_rate: float = 2e-3  # at 1e-2 Muon takes apart what `beginning` laid in
    other_learning_rate: float = 2e-3  # of what Muon does not move; AdamW moves all at `learning_rate`
    weight_decay: float = 0.1
    num_warmup_steps: int = 100
    max_gradient_norm: float = 1.0
    balance_speed: float = 1e-2  # by how much a step moves the router's bias
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the computation; weights are float32
    rows_at_once: int = 1  # see models.training.attend_causal

    @property
    def num_steps(self) -> int:
        return sum(stage.num_steps for stage in self.stages)

    @property
    def num_tokens(self) -> int:
        return sum(stage.num_steps * stage.num_rows * stage.num_tokens for stage in self.stages)

    def stage_of(self, step: int) -> TrainingStage:
        """The stage of a step, counted from 0. IndexError beyond the last."""
        first = 0
        for stage in self.stages:
            first += stage.num_steps
            if 0 <= step < first:
                return stage
        raise IndexError(f"step {step} of {self.num_steps}")

    def tokens_until(self, step: int) -> int:
        """Tokens in all steps before this one, padding included."""
        total = 0
        for stage in self.stages:
            taken = min(step, stage.num_steps)
            total += taken * stage.num_rows * stage.num_tokens
            step -= taken
        return total


# Recall is learned first, and needs less from then on; at great lengths it is what is new.
MOSTLY_TOOLS = (("recall", 0.20), ("tools", 0.54), ("agents", 0.16), ("talk", 0.04), ("copying", 0.06))
TOOLS_AGAIN = (("recall", 0.14), ("tools", 0.62), ("agents", 0.16), ("talk", 0.04), ("copying", 0.04))
MORE_TOOLS = (("recall", 0.36), ("tools", 0.40), ("agents", 0.20), ("talk", 0.04))
MORE_RECALL = (("recall", 0.54), ("tools", 0.24), ("agents", 0.18), ("talk", 0.04))
MOSTLY_RECALL = (("recall", 0.66), ("tools", 0.20), ("agents", 0.12), ("talk", 0.02))
EVENLY = (("recall", 0.44), ("tools", 0.36), ("agents", 0.16), ("talk", 0.04))
CPU = Recipe(
    stages=(
        TrainingStage(name="short", num_tokens=256, num_rows=16, num_steps=900),
        TrainingStage(name="medium", num_tokens=512, num_rows=8, num_steps=1363, gapped_share=0.3),
        TrainingStage(name="tools", num_tokens=512, num_rows=8, num_steps=2037, gapped_share=0.3, shares=MOSTLY_TOOLS),
        TrainingStage(name="long", num_tokens=1024, num_rows=4, num_steps=900, gapped_share=0.5, shares=MORE_TOOLS),
        TrainingStage(name="longer", num_tokens=2048, num_rows=2, num_steps=700, gapped_share=0.5, shares=MORE_RECALL),
        TrainingStage(name="longest", num_tokens=4096, num_rows=1, num_steps=350, shares=MORE_RECALL),
        TrainingStage(
            name="tools again", num_tokens=512, num_rows=8, num_steps=3000, gapped_share=0.3, shares=TOOLS_AGAIN
        ),
        TrainingStage(
            name="long again", num_tokens=1024, num_rows=4, num_steps=300, gapped_share=0.3, shares=MORE_TOOLS
        ),
        TrainingStage(
            name="longer again", num_tokens=2048, num_rows=2, num_steps=300, gapped_share=0.3, shares=MORE_RECALL
        ),
        TrainingStage(name="longest again", num_tokens=4096, num_rows=1, num_steps=200, shares=MORE_RECALL),
        TrainingStage(
            name="tools at last", num_tokens=512, num_rows=8, num_steps=500, gapped_share=0.3, shares=TOOLS_AGAIN
        ),
        TrainingStage(
            name="longer at last", num_tokens=2048, num_rows=2, num_steps=250, gapped_share=0.3, shares=EVENLY
        ),
        TrainingStage(name="longest at last", num_tokens=4096, num_rows=1, num_steps=450, shares=EVENLY),
        TrainingStage(
            name="calls", num_tokens=512, num_rows=8, num_steps=600, gapped_share=0.3, shares=TOOLS_AGAIN, call_weight=4
        ),
        TrainingStage(
            name="longer with calls",
            num_tokens=2048,
            num_rows=2,
            num_steps=150,
            gapped_share=0.3,
            shares=MORE_RECALL,
            call_weight=4,
        ),
        TrainingStage(
            name="longest with calls", num_tokens=4096, num_rows=1, num_steps=200, shares=MOSTLY_RECALL, call_weight=4
        ),
    ),
    restarts=(
        Restart(step=6250, rate=0.5, least_balance=0.2),
        Restart(step=10050, rate=0.5, least_balance=0.5),
        Restart(step=11250, rate=0.5, least_balance=0.5),
    ),
    averaged=(10050, 11250, 12200),  # the ends of the last three cycles
)
FOR_CLIENTS = (
    ("clients", 0.56),
    ("recall", 0.14),
    ("tools", 0.10),
    ("agents", 0.14),
    ("talk", 0.03),
    ("copying", 0.03),
)
LONG_FOR_CLIENTS = (("clients", 0.32), ("recall", 0.44), ("tools", 0.06), ("agents", 0.16), ("talk", 0.02))
CLIENTS = Recipe(
    stages=(
        TrainingStage(
            name="clients",
            num_tokens=512,
            num_rows=8,
            num_steps=1000,
            gapped_share=0.3,
            shares=FOR_CLIENTS,
            call_weight=2,
        ),
        TrainingStage(
            name="longer clients",
            num_tokens=2048,
            num_rows=2,
            num_steps=250,
            gapped_share=0.3,
            shares=LONG_FOR_CLIENTS,
            call_weight=2,
        ),
        TrainingStage(
            name="longest clients",
            num_tokens=4096,
            num_rows=1,
            num_steps=250,
            shares=LONG_FOR_CLIENTS,
            call_weight=2,
        ),
    ),
    begins="embedded",
    learning_rate=1e-3,
    other_learning_rate=1e-3,
)
GPU = Recipe(
    stages=(
        TrainingStage(name="short", num_tokens=256, num_rows=256, num_steps=1000),
        TrainingStage(name="medium", num_tokens=512, num_rows=128, num_steps=4000),
        TrainingStage(name="long", num_tokens=2048, num_rows=32, num_steps=800),
        TrainingStage(name="longest", num_tokens=4096, num_rows=16, num_steps=400),
    ),
    dtype="bfloat16",
    rows_at_once=16,
)
TINY = Recipe(
    stages=(
        TrainingStage(name="short", num_tokens=64, num_rows=8, num_steps=20),
        TrainingStage(name="medium", num_tokens=128, num_rows=8, num_steps=20),
    ),
    num_warmup_steps=5,
)
RECIPES: Mapping[str, Recipe] = MappingProxyType({"cpu": CPU, "clients": CLIENTS, "gpu": GPU, "tiny": TINY})
