"""What a profile of steps holds, and what is asked for: plain records, for the process that measures and the table."""

from dataclasses import dataclass

from moonshard.experiments.bench.floors.work import Ceilings, Work


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileJob:
    overrides: tuple[str, ...]  # the whole configuration
    batches: tuple[int, ...]
    context_tokens: int  # before a decode step
    repeats: int
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationTime:
    """All operations of one part and kind, in one step."""

    part: str
    kind: str
    ms: float
    count: float  # how often one ran


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    name: str
    step_ms: float  # the median, without the profiler
    operations: tuple[OperationTime, ...]  # those that take most first
    least: dict[str, Work]  # by part; empty for a model whose work is not known

    @property
    def operations_ms(self) -> float:
        return sum(one.ms for one in self.operations)


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    ceilings: Ceilings
    steps: tuple[StepProfile, ...]
