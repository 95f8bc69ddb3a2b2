"""The `[workload]` table: its kinds, what each may be told, and the requests that come of it.

What a request is and how each kind is made is `experiments.workload`'s. Lengths are checked against the model that is
served, so that the requests are made when a server tells of it; files are read before anything is started.
"""

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from moonshard.experiments.affinity.workload import agent_sessions
from moonshard.experiments.lab.fields import ExperimentError, read_fields
from moonshard.experiments.lab.flat import Flat
from moonshard.experiments.pocket.corpus import pocket_text
from moonshard.experiments.trace_file import read_ordered_trace
from moonshard.experiments.workload.kinds import fixed, from_prompts, from_trace, sessions
from moonshard.experiments.workload.mixed import mixed
from moonshard.experiments.workload.plan import Workload, WorkloadError
from moonshard.rpc.types import ModelInfo

Count = Annotated[int, Meta(ge=1)]
Rate = Annotated[float, Meta(gt=0)]
Seed = Annotated[int, Meta(ge=0, lt=1 << 31)]
# What makes one load of a workload differ from another: a higher rate needs more requests to last as long.
RATE_KEYS = ("workload.rate_per_s", "workload.time_scale", "workload.num_requests")


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceOptions:
    """A trace in Mooncake's public format."""

    kind: Literal["trace"]
    path: Path
    max_requests: Count | None = None  # the first so many
    time_scale: Rate = 1.0  # 0.5 sends twice as many a second
    length_scale: Rate = 1.0
    clips: bool = False  # cut what is longer than the context, and count it
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedOptions:
    """Fresh prompts of one length: an open loop with a rate, else clients that wait for their answers."""

    kind: Literal["fixed"]
    num_prompt: Count
    num_output: Count
    num_requests: Count
    rate_per_s: Rate | None = None
    variation: Annotated[float, Meta(ge=0)] = 1.0  # of the intervals: 1 Poisson, 0 none
    num_clients: Count = 1
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedOptions:
    """Fresh prompts of several shapes: a list entry for each of them."""

    kind: Literal["mixed"]
    num_prompt: tuple[Count, ...]
    num_output: tuple[Count, ...]
    weights: tuple[Annotated[float, Meta(ge=0)], ...]
    num_requests: Count
    rate_per_s: Rate
    variation: Annotated[float, Meta(ge=0)] = 1.0
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionOptions:
    """Agents whose context grows turn by turn, in the tokens of the embedded model."""

    kind: Literal["sessions"]
    num_sessions: Count
    session_tokens: Count
    max_tokens: Count
    num_clients: Count = 1
    mean_think_s: Annotated[float, Meta(ge=0)] = 0.0
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOptions:
    """A file of real prompts."""

    kind: Literal["prompts"]
    path: Path
    clips: bool = False


type WorkloadOptions = TraceOptions | FixedOptions | MixedOptions | SessionOptions | PromptOptions
KINDS: dict[str, type[WorkloadOptions]] = {
    "trace": TraceOptions,
    "fixed": FixedOptions,
    "mixed": MixedOptions,
    "sessions": SessionOptions,
    "prompts": PromptOptions,
}


def read_workload(given: Flat, faults: list[str]) -> WorkloadOptions | None:
    """None where something is wrong, which `faults` then names."""
    kind = given.get("kind")
    if kind not in KINDS:
        faults.append(f"workload.kind: expected one of {', '.join(KINDS)}, got {kind!r}")
        return None
    return read_fields(KINDS[str(kind)], given, "workload", faults)


def check_files(options: WorkloadOptions) -> None:
    """Reads what there is to read. ExperimentError naming the file, the line and what is wrong with it."""
    if not isinstance(options, TraceOptions | PromptOptions):
        return
    try:
        if isinstance(options, TraceOptions):
            num_requests = len(read_ordered_trace(options.path))
        else:
            num_requests = len(from_prompts(options.path, max_context_tokens=1 << 62).requests)
    except OSError as error:
        raise ExperimentError(f"workload.path: {options.path}: {error.strerror}") from error
    except ValueError as error:
        raise ExperimentError(f"workload.path: {error}") from error
    if not num_requests:
        raise ExperimentError(f"workload.path: {options.path}: no requests")


def with_seed(options: WorkloadOptions, shift: int) -> WorkloadOptions:
    """The same with other prompts and times; a file of prompts is what it is."""
    return options if isinstance(options, PromptOptions) else replace(options, seed=options.seed + shift)


def plan(options: WorkloadOptions, model: ModelInfo) -> Workload:
    """WorkloadError for what does not fit the model."""
    context = {"max_context_tokens": model.max_context_tokens, "vocab_size": model.vocab_size}
    match options:
        case TraceOptions(path=path, max_requests=most):
            told = {key: value for key, value in _told(options).items() if key not in ("path", "max_requests")}
            try:
                return from_trace(read_ordered_trace(path)[:most], **context, **told)
            except WorkloadError as error:
                raise WorkloadError(f"{path}: {error}") from error
        case FixedOptions():
            return _fitting(fixed(vocab_size=model.vocab_size, **_told(options)), model)
        case MixedOptions():
            return _fitting(mixed(vocab_size=model.vocab_size, **_told(options)), model)
        case SessionOptions():
            return _sessions(options, model)
        case PromptOptions():
            return from_prompts(options.path, max_context_tokens=model.max_context_tokens, clips=options.clips)


def settings_of(options: WorkloadOptions) -> Flat:
    """Every option, as JSON has it."""
    return {name: _plain(value) for name, value in asdict(options).items()}


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value


def _told(options: TraceOptions | FixedOptions | MixedOptions) -> dict[str, Any]:
    """What the function that makes the requests is told."""
    return {field.name: getattr(options, field.name) for field in fields(options) if field.name != "kind"}


def _fitting(workload: Workload, model: ModelInfo) -> Workload:
    for place, one in enumerate(workload.requests):
        if len(one.prompt) + one.max_tokens > model.max_context_tokens:
            both = f"{len(one.prompt)} + {one.max_tokens} tokens"
            raise WorkloadError(f"request {place}: {both} are more than a context of {model.max_context_tokens}")
    return workload


def _sessions(options: SessionOptions, model: ModelInfo) -> Workload:
    found = agent_sessions(pocket_text(), options.num_sessions, options.session_tokens, seed=options.seed)
    for number, turns in enumerate(found):
        most = max(len(prompt) for prompt in turns) + options.max_tokens
        if most > model.max_context_tokens:
            raise WorkloadError(
                f"session {number}: {most} tokens are more than a context of {model.max_context_tokens}"
            )
        if max(max(prompt) for prompt in turns) >= model.vocab_size:
            raise WorkloadError("sessions are in tokens of the embedded model, of which the served one has fewer")
    return sessions(
        found,
        max_tokens=options.max_tokens,
        num_clients=options.num_clients,
        mean_think_s=options.mean_think_s,
        seed=options.seed,
    )
