"""The `[workload]` table: its kinds, what each may be told, and the requests that come of it.

Files are read before anything is started, and lengths are checked then too where the configuration says the context.
The requests are made when a server has told its model.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from moonshard.experiments.common.fields import ExperimentError, read_fields
from moonshard.experiments.common.flat import Flat
from moonshard.experiments.common.trace_file import read_trace
from moonshard.experiments.training.texts.corpus import pocket_text
from moonshard.experiments.workload.agents import agent_sessions
from moonshard.experiments.workload.fixed import fixed
from moonshard.experiments.workload.mixed import mixed
from moonshard.experiments.workload.plan import Workload, WorkloadError
from moonshard.experiments.workload.prompts import Tokenize, from_prompts, read_prompts
from moonshard.experiments.workload.sessions import sessions
from moonshard.experiments.workload.thoughts import Thoughts
from moonshard.experiments.workload.trace import bin_s, from_trace
from moonshard.rpc.types import ModelInfo

Count = Annotated[int, Meta(ge=1)]
MOST = 1e6  # of anything that is no count: beyond it are slips, and infinity
Rate = Annotated[float, Meta(gt=0, le=MOST)]
Seconds = Annotated[float, Meta(ge=0, le=MOST)]
MAX_SEED = 1 << 31
Seed = Annotated[int, Meta(ge=0, lt=MAX_SEED)]
Cv = Annotated[float, Meta(ge=0, le=100)]
# What makes one load of a workload differ from another: a higher rate needs more requests to last as long.
RATE_KEYS = ("workload.rate_per_s", "workload.times_capacity", "workload.time_scale", "workload.num_requests")


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceOptions:
    """A trace in Mooncake's public format."""

    kind: Literal["trace"]
    path: Path
    max_requests: Count | None = None  # the first so many
    jitter_s: Seconds | None = None  # None: as exact as its stamps are
    time_scale: Rate = 1.0  # 0.5 sends twice as many a second
    length_scale: Rate = 1.0
    clips: bool = False  # cut what is longer than the context, and count it
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedOptions:
    """Fresh prompts of one length: an open loop with a rate, else clients that wait for their answers."""

    kind: Literal["fixed"]
    prompt_tokens: Count
    output_tokens: Count
    num_requests: Count
    rate_per_s: Rate | None = None
    interval_cv: Cv = 1.0  # standard deviation of the intervals by their mean: 1 Poisson, 0 none
    num_clients: Count = 1
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RelativeOptions:
    """Fresh prompts of one length in an open loop, at a rate relative to what the run's first point gets done."""

    kind: Literal["relative"]
    prompt_tokens: Count
    output_tokens: Count
    times_capacity: Rate
    lasts_s: Annotated[float, Meta(gt=0, le=MOST)]
    interval_cv: Cv = 1.0
    seed: Seed = 0

    def at(self, capacity_per_s: float) -> FixedOptions:
        """The options with a fixed rate, where the first point gets `capacity_per_s` requests a second done."""
        rate_per_s = self.times_capacity * capacity_per_s
        return FixedOptions(
            kind="fixed",
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            num_requests=max(1, round(rate_per_s * self.lasts_s)),
            rate_per_s=rate_per_s,
            interval_cv=self.interval_cv,
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedOptions:
    """Fresh prompts of several shapes: a list entry for each of them."""

    kind: Literal["mixed"]
    prompt_tokens: tuple[Count, ...]
    output_tokens: tuple[Count, ...]
    weights: tuple[Annotated[float, Meta(ge=0, le=MOST)], ...]
    num_requests: Count
    rate_per_s: Rate
    interval_cv: Cv = 1.0
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionOptions:
    """Agents whose context grows turn by turn, in the tokens of the embedded model."""

    kind: Literal["sessions"]
    num_sessions: Count
    session_tokens: Count
    max_tokens: Count
    num_clients: Count = 1
    mean_think_s: Seconds = 0.0
    thoughts: Thoughts = (
        "none"  # of a model that thinks before each turn: dropped from later prompts by its rule, or kept
    )
    thought_words: Count = 16  # of each thought
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOptions:
    """A file of real prompts."""

    kind: Literal["prompts"]
    path: Path
    clips: bool = False


type WorkloadOptions = TraceOptions | FixedOptions | RelativeOptions | MixedOptions | SessionOptions | PromptOptions
KINDS: dict[str, type[WorkloadOptions]] = {
    "trace": TraceOptions,
    "fixed": FixedOptions,
    "relative": RelativeOptions,
    "mixed": MixedOptions,
    "sessions": SessionOptions,
    "prompts": PromptOptions,
}


def read_workload(given: Flat, faults: list[str]) -> WorkloadOptions | None:
    """The options of the table; None where something is wrong, which `faults` then names."""
    kind = given.get("kind")
    if kind not in KINDS:
        faults.append(f"workload.kind: expected one of {', '.join(KINDS)}, got {kind!r}")
        return None
    return read_fields(KINDS[str(kind)], given, "workload", faults)


def check_workload(options: WorkloadOptions, max_context_tokens: int | None) -> None:
    """Reads the files, and checks that all fits where the context is known; texts have no length yet.

    ExperimentError naming the file, the line and what is wrong with it.
    """
    try:
        num_requests = _num_requests(options, max_context_tokens or 1 << 62)
    except OSError as error:
        raise ExperimentError(f"workload.path: {error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise ExperimentError(f"workload: {error}") from error
    if not num_requests:
        raise ExperimentError("workload.path: no requests")


def with_shifted_seed(options: WorkloadOptions, shift: int) -> WorkloadOptions:
    """The options with other prompts and times; a file of prompts stays the same."""
    if isinstance(options, PromptOptions):
        return options
    return replace(options, seed=(options.seed + shift) % MAX_SEED)


def plan(options: WorkloadOptions, model: ModelInfo, tokenize: Tokenize | None = None) -> Workload:
    """The requests. WorkloadError for what does not fit the model, or texts without a tokenizer."""
    vocab_size, max_context_tokens = model.vocab_size, model.max_context_tokens
    match options:
        case TraceOptions():
            return _from_trace(options, vocab_size=vocab_size, max_context_tokens=max_context_tokens)
        case FixedOptions():
            return _fitting(fixed(vocab_size=vocab_size, **_told(options)), max_context_tokens)
        case RelativeOptions():
            raise WorkloadError("its rate is told by the run's first point, which was not measured")
        case MixedOptions():
            return _fitting(mixed(vocab_size=vocab_size, **_told(options)), max_context_tokens)
        case SessionOptions():
            return _sessions(options, model)
        case PromptOptions(path=path, clips=clips):
            make = partial(from_prompts, read_prompts(path), tokenize=tokenize, clips=clips, vocab_size=vocab_size)
            return _located(path, partial(make, max_context_tokens=max_context_tokens))


def settings_of(options: WorkloadOptions) -> Flat:
    """Every option, in the form that JSON has."""
    return {name: _plain(value) for name, value in asdict(options).items()}


def digest_of(options: WorkloadOptions) -> Mapping[str, str]:
    """A short hash of the workload's file, under one key; empty without a file, or where it cannot be read."""
    if not isinstance(options, TraceOptions | PromptOptions):
        return {}
    try:
        with options.path.open("rb") as file:
            return {"digest": hashlib.file_digest(file, "sha256").hexdigest()[:16]}
    except OSError:
        return {}  # whoever reads what is in it says why


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value


def _told(options: FixedOptions | MixedOptions) -> dict[str, Any]:
    """The arguments of the function that makes the requests."""
    return {field.name: getattr(options, field.name) for field in fields(options) if field.name != "kind"}


def _num_requests(options: WorkloadOptions, max_context_tokens: int) -> int:
    """How many requests can be counted before the server starts. ValueError for faults, OSError for files."""
    match options:
        case TraceOptions():
            return len(_from_trace(options, max_context_tokens=max_context_tokens, vocab_size=1).requests)
        case PromptOptions(path=path, clips=clips):
            lines = read_prompts(path)
            counted = [line for line in lines if line.token_ids is not None]
            make = partial(from_prompts, counted, clips=clips, vocab_size=1 << 62)
            _located(path, partial(make, max_context_tokens=max_context_tokens))
            return len(lines)
        case FixedOptions():
            return len(_fitting(fixed(vocab_size=1, **_told(options)), max_context_tokens).requests)
        case RelativeOptions():
            return _num_requests(options.at(capacity_per_s=1.0), max_context_tokens)  # as long ones at any rate
        case MixedOptions():
            return len(_fitting(mixed(vocab_size=1, **_told(options)), max_context_tokens).requests)
        case SessionOptions():
            return options.num_sessions  # to make them takes seconds: their lengths are known when they are sent


def _from_trace(options: TraceOptions, *, max_context_tokens: int, vocab_size: int) -> Workload:
    traced = read_trace(options.path)
    return _located(
        options.path,
        lambda: from_trace(
            traced[: options.max_requests],
            vocab_size=vocab_size,
            max_context_tokens=max_context_tokens,
            jitter_s=bin_s(traced) if options.jitter_s is None else options.jitter_s,
            time_scale=options.time_scale,
            length_scale=options.length_scale,
            clips=options.clips,
            seed=options.seed,
        ),
    )


def _located(path: Path, make: Callable[[], Workload]) -> Workload:
    """Adds the file's name to a WorkloadError."""
    try:
        return make()
    except WorkloadError as error:
        raise WorkloadError(f"{path}, {error}") from error


def _fitting(workload: Workload, max_context_tokens: int) -> Workload:
    for number, one in enumerate(workload.requests):
        if len(one.prompt) + one.max_tokens > max_context_tokens:
            both = f"{len(one.prompt)} + {one.max_tokens} tokens"
            raise WorkloadError(f"request {number}: {both} are more than a context of {max_context_tokens}")
    return workload


def _sessions(options: SessionOptions, model: ModelInfo) -> Workload:
    found = agent_sessions(
        pocket_text(),
        options.num_sessions,
        options.session_tokens,
        seed=options.seed,
        thoughts=options.thoughts,
        thought_words=options.thought_words,
    )
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
