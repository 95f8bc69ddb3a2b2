"""The sampling parameters of a request, each declared once.

A field of `Sampling` made by `_parameter` says what a parameter is called, what it is where nobody asks for it, and
what may be asked for; `PARAMETERS` has these declarations in order. Bodies of HTTP, public gRPC messages, the message
to a worker, the layout of a step, its encoder and the rows on the device are read and written by loops over it, under
the parameter's own name. A new one takes a field here; a field of that name in `SamplingParams`, `EngineSampling`
(rpc/*.proto) and `GenerateOptions` (rpc/types.py), since `rpc` imports nothing of the server; and one of `RowSampling`
beside its mathematics (models/sampling.py); then `make proto`, and a higher `PROTOCOL_VERSION` (rpc/link.py). One that
was refused until then leaves `NO_OPS` and `GenerationBody` (gateway/openai/requests.py); one that
generation_config.json may set is a field of `GenerationDefaults` (models/folder/generation.py) too. What is no single
number (`logit_bias`) goes its own way.

The table is of the control plane, the lowest floor that gateway, wire and engine share. The model side does not import
it: the engine fills `RowSampling` by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

SEED_BITS = 64
_FLOAT32_MAX = (2 - 2**-23) * 2.0**127


@dataclass(frozen=True, slots=True)
class Range:
    """An interval of the reals; `open_low` excludes its lower end. NaN is in none."""

    low: float
    high: float
    open_low: bool = False

    def __contains__(self, value: float) -> bool:
        is_above = self.low < value if self.open_low else self.low <= value
        return is_above and value <= self.high

    def __str__(self) -> str:
        return f"{'greater than' if self.open_low else 'at least'} {_exact(self.low)} and at most {_exact(self.high)}"


def _exact(bound: float) -> str:
    """Every digit: a rounded bound may itself be refused."""
    return str(int(bound)) if bound == int(bound) else str(bound)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A number by which the next token is drawn."""

    name: str
    dtype: Literal["float32", "int32", "uint64"]  # on the device, where 64 bits are two words
    default: float  # where neither the client nor the model folder says anything
    neutral: float  # in a row that is nobody's: it costs nothing
    bounds: Range  # what a client may ask for
    engine_bounds: Range  # what the device takes
    for_engine: Callable[[float], float]  # from the one to the other
    needs_history: bool  # at any other value than the default, the tokens that came before must be known
    is_in_spans: bool  # OpenTelemetry has a name for it: spans say what the client asked

    @property
    def is_integer(self) -> bool:
        return self.dtype != "float32"

    @property
    def is_wide(self) -> bool:
        return self.dtype == "uint64"


def _parameter[T: (int, float)](
    default: T,
    bounds: Range,
    *,
    dtype: Literal["float32", "int32", "uint64"] = "float32",
    neutral: T | None = None,
    engine_bounds: Range | None = None,
    for_engine: Callable[[T], T] = lambda value: value,
    needs_history: bool = False,
    is_in_spans: bool = False,
) -> T:
    """A field of `Sampling`. The device has its `default` too where nothing is asked for, and the client's bounds."""
    metadata = {
        "dtype": dtype,
        "default": default,
        "neutral": default if neutral is None else neutral,
        "bounds": bounds,
        "engine_bounds": engine_bounds or bounds,
        "for_engine": for_engine,
        "needs_history": needs_history,
        "is_in_spans": is_in_spans,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is drawn. Order: penalties and bias, temperature, min-p, top-k, top-p (as vLLM).

    The bounds of clients are OpenAI's, and vLLM's for what OpenAI does not have. A folder's temperature may be higher.
    """

    temperature: float = _parameter(  # 0 is greedy
        1.0, Range(0, 2), neutral=0.0, engine_bounds=Range(0, _FLOAT32_MAX), is_in_spans=True
    )
    top_p: float = _parameter(1.0, Range(0, 1, open_low=True), is_in_spans=True)
    top_k: int = _parameter(  # 0 is off, and clients say -1 too
        0,
        Range(-1, 2**31 - 1),
        dtype="int32",
        engine_bounds=Range(0, 2**31 - 1),
        for_engine=lambda value: max(0, value),
        is_in_spans=True,
    )
    min_p: float = _parameter(0.0, Range(0, 1))
    repetition_penalty: float = _parameter(  # over prompt and output; finite in float32 too
        1.0, Range(0, 1e6, open_low=True), needs_history=True
    )
    presence_penalty: float = _parameter(0.0, Range(-2, 2), needs_history=True, is_in_spans=True)  # over output
    frequency_penalty: float = _parameter(0.0, Range(-2, 2), needs_history=True, is_in_spans=True)  # over output
    seed: int = _parameter(  # noise is keyed by (seed, choice, absolute position); the gateway draws one that is unsaid
        0,
        Range(-(2.0 ** (SEED_BITS - 1)), 2.0**SEED_BITS),
        dtype="uint64",
        engine_bounds=Range(0, 2.0**SEED_BITS),
        for_engine=lambda value: value % 2**SEED_BITS,
        is_in_spans=True,
    )
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])

    @property
    def needs_history(self) -> bool:
        """Whether the logits depend on which tokens came before, beyond the model's own view of them."""
        return any(
            getattr(self, parameter.name) != parameter.default for parameter in PARAMETERS if parameter.needs_history
        )


PARAMETERS = tuple(Parameter(name=each.name, **each.metadata) for each in fields(Sampling) if each.metadata)
