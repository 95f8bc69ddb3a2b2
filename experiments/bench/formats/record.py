"""What is measured of each number format, and what is asked for: plain records, for the process and for the table."""

from dataclasses import dataclass

from moonshard.experiments.bench.floors.work import Ceilings


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """The same model, as one folder stores it or as `model.weights` holds it."""

    name: str
    folder: str
    holding: str  # model.weights


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatsJob:
    overrides: tuple[str, ...]  # the whole configuration, but for the folder and how its weights are held
    arms: tuple[Arm, ...]
    batches: tuple[int, ...]
    kernel_batches: tuple[int, ...]
    context_tokens: int  # before a decode step
    prompt_tokens: tuple[int, ...]
    repeats: int
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTimes:
    """Of one kernel by itself, with weights that no cache holds."""

    kernel: str
    batch: int
    call_us: float  # of one layer
    call_bytes: float  # of weights


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatTimes:
    """Of one arm. Those of all arms took turns."""

    name: str
    held_bytes: int  # of all weights, scales included
    decode_ms: dict[int, float]  # by batch: the median step
    decode_bytes: dict[int, float]  # by batch: weights that a step reads, where the router is even, and cached keys
    prefill_ms: dict[int, float]  # by tokens of the prompt
    kernels: tuple[KernelTimes, ...] = ()  # none where XLA computes


@dataclass(frozen=True, kw_only=True, slots=True)
class Formats:
    ceilings: Ceilings
    context_tokens: int
    times: tuple[FormatTimes, ...]
