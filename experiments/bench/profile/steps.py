"""Steps under the profiler: what runs, which program's operations these are, and the least that each part asks.

A step is timed first without the profiler, which costs some microseconds for each operation.
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from moonshard.experiments.bench.floors.asked import even_work, item_bytes
from moonshard.experiments.bench.floors.work import Work
from moonshard.experiments.bench.profile.operations import SAMPLING, Operation, parts_of, read_operations
from moonshard.experiments.bench.profile.record import OperationTime, ProfileJob, StepProfile
from moonshard.experiments.bench.profile.trace import Spent, operation_times
from moonshard.experiments.bench.steps.bare_steps import BareSteps, run_steps
from moonshard.models.model import LatentModel
from moonshard.models.registry import open_model
from moonshard.serving.config.keys import Config
from moonshard.serving.engine.loading.model import LoadedModel, load_model
from moonshard.serving.engine.programs import Programs
from moonshard.serving.engine.steps import ProgramKey, Step, StepKind

STEPS = 16  # of a decode, in a repeat
UNKNOWN = "unknown"


def profile_steps(config: Config, job: ProfileJob) -> list[StepProfile]:
    """A decode step of each batch, and the largest chunk of a prompt."""
    model = load_model(config, "both", lambda message: None, prepares="none")
    steps, context, chunk = BareSteps(model, job.seed), job.context_tokens, model.shapes.prefill_buckets[-1]
    found = []
    for batch in job.batches:
        for index in range(batch):
            run_steps(model.programs, steps.prefill(index, context))
        runs = [steps.decode(range(batch), context, STEPS) for _ in range(job.repeats)]
        middle = context + STEPS // 2
        least = _least(config, [(middle, middle + 1)] * batch)
        found.append(_profiled(f"decode, batch {batch}, context {context}", model, runs, least))
    prompts = [steps.prefill(0, chunk) for _ in range(job.repeats)]
    found.append(_profiled(f"prefill, chunk of {chunk}", model, prompts, _least(config, [(0, chunk)])))
    return found


def _profiled(name: str, model: LoadedModel, runs: Sequence[Sequence[Step]], least: dict[str, Work]) -> StepProfile:

    programs, first = model.programs, runs[0][0]
    known = _known_operations(model, (first.kind, first.bucket))
    run_steps(programs, runs[0])  # warms up
    step_ms = median([each_ms for run in runs for each_ms in _times_ms(programs, run)])
    spent = operation_times(lambda: [run_steps(programs, run) for run in runs])
    operations = by_kind(spent, known, sum(map(len, runs)))
    return StepProfile(name=name, step_ms=step_ms, operations=operations, least=least)


def _times_ms(programs: Programs, run: Sequence[Step]) -> list[float]:
    """Between the tokens of steps that follow one another; a single step from its launch on."""
    begun_ns = time.perf_counter_ns()
    arrivals_ns = run_steps(programs, run)
    times_ns = [begun_ns, *arrivals_ns] if len(run) == 1 else arrivals_ns
    return [(after - before) / 1e6 for before, after in pairwise(times_ns)]


def _known_operations(model: LoadedModel, step: ProgramKey) -> list[dict[str, Operation]]:
    """Those of the step's program, and of the one that draws tokens after it. Compiles both."""
    prepared, found = model.programs.prepared, []
    wanted = {each.key: each for each in (*prepared.needed, *prepared.others)}
    for key in (step, (StepKind.DRAW, 0)):
        compiled = wanted[key].blueprint.lower(key).compile()
        prepared.take(wanted[key], compiled)
        operations = read_operations(compiled.as_text() or "")
        if key != step:
            operations = {name: replace(one, part=SAMPLING) for name, one in operations.items()}
        found.append(operations)
    return found


def by_kind(
    spent_ns: Mapping[tuple[int, str], Spent], known: Sequence[Mapping[str, Operation]], num_steps: int
) -> tuple[OperationTime, ...]:
    """Operations of one part and kind together, by step, those that take most first.

    A program of the profile is the known one that has most of its operations; containers have no time of their own.
    """
    names: dict[int, set[str]] = defaultdict(set)
    for program, name in spent_ns:
        names[program].add(name)
    program_of = {program: max(known, key=lambda one: len(own & one.keys())) for program, own in names.items()}
    total_ns: dict[tuple[str, str], float] = defaultdict(float)
    count: dict[tuple[str, str], int] = defaultdict(int)
    for (program, name), spent in spent_ns.items():
        operation = program_of[program].get(name)
        if operation is None or not operation.is_container:
            which = (operation.part, operation.kind) if operation else (UNKNOWN, name)
            total_ns[which] += spent.ns
            count[which] += spent.count
    ordered = sorted(total_ns, key=lambda which: -total_ns[which])
    return tuple(
        OperationTime(
            part=part, kind=kind, ms=total_ns[part, kind] / num_steps / 1e6, count=count[part, kind] / num_steps
        )
        for part, kind in ordered
    )


def _least(config: Config, spans: list[tuple[int, int]]) -> dict[str, Work]:
    """By part; nothing of a model without latent attention."""
    _, model = open_model(config.model.path)
    if not isinstance(model, LatentModel):
        return {}
    return parts_of(even_work(model, spans, item_bytes(config)))
