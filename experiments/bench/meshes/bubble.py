"""How much of the time the stages of a pipeline have no work while they decode: with one microbatch, and with many.

The device side alone: steps are made beforehand and launched as the engine launches them, so that only the devices hold
each other up. Nothing is prefilled: a step's work depends on its positions, and not on what the pages hold.
"""

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import jax

from moonshard.experiments.bench.meshes.tables import PIPES, bubble, bubble_name, busy_name, step_name
from moonshard.experiments.bench.steps.bare_steps import BareSteps
from moonshard.experiments.common.running.measurement import Measurement, Plan
from moonshard.serving.config.keys import Config
from moonshard.serving.engine.loading.model import LoadedModel, load_model
from moonshard.serving.engine.pace import MIN_IN_FLIGHT
from moonshard.serving.engine.programs import Programs
from moonshard.serving.engine.steps import Step
from moonshard.sharding.shape import MeshShape


def measure_bubbles(config: Config, plan: Plan, pipes: Sequence[int] = PIPES) -> list[Measurement]:
    """Measures pipelines of each length. Needs a device for each stage of the longest one."""
    found: list[Measurement] = []
    for num_stages in pipes:
        model = load_model(_piped(config, plan, num_stages), "both", lambda message: None)
        for num_microbatches in (1, num_stages):
            found += _measure(model, plan, num_stages, num_microbatches)
    return found


def microbatches(steps: BareSteps, plan: Plan, num_microbatches: int) -> list[Step]:
    """The steps of all microbatches in turn. A sequence is in the one that the scheduler would give its slot."""
    each = [
        steps.decode(range(index, plan.pipeline_rows, num_microbatches), plan.pipeline_context, plan.pipeline_steps)
        for index in range(num_microbatches)
    ]
    return [step for turn in zip(*each, strict=True) for step in turn]


def _measure(model: LoadedModel, plan: Plan, num_stages: int, num_microbatches: int) -> list[Measurement]:
    steps = microbatches(BareSteps(model, seed=0), plan, num_microbatches)
    in_flight = MIN_IN_FLIGHT + num_microbatches - 1
    _step_ms(model.programs, steps, in_flight)
    busy_ms, step_ms = [], []
    for _ in range(plan.pipeline_repeats):
        busy_ms.append(_busy_ms(model.programs, steps[0], plan.pipeline_steps))
        step_ms.append(_step_ms(model.programs, steps, in_flight))
    shares = tuple(bubble(busy, length) for busy, length in zip(busy_ms, step_ms, strict=True))
    of_pipe = num_stages, num_microbatches
    return [
        Measurement(level="meshes", name=bubble_name(*of_pipe), unit="share", samples=shares),
        Measurement(level="meshes", name=step_name(*of_pipe), unit="ms", samples=tuple(step_ms)),
        *(
            Measurement(level="meshes", name=busy_name(stage, *of_pipe), unit="ms", samples=samples)
            for stage, samples in enumerate(zip(*busy_ms, strict=True))
        ),
    ]


def _step_ms(programs: Programs, steps: Sequence[Step], in_flight: int) -> float:
    """From one step's tokens to the next one's, while the pipeline is full."""
    flying, arrivals_ns = deque(), []
    for step in steps:
        if len(flying) == in_flight:
            programs.fetch(flying.popleft())
            arrivals_ns.append(time.perf_counter_ns())
        flying.append(programs.launch(step))
    for launched in flying:
        programs.fetch(launched)
    full = arrivals_ns[in_flight:]
    return (full[-1] - full[0]) / (len(full) - 1) / 1e6


def _busy_ms(programs: Programs, step: Step, num_runs: int) -> tuple[float, ...]:
    """How long each stage runs its program alone: the mean of many runs in a row, so that no launch is waited for."""
    hidden, found = None, []
    for stage, onward in itertools.zip_longest(programs.stages, programs.onward):
        result = jax.block_until_ready(stage.run(step.kind, step.bucket, step.metadata, hidden))
        begun_ns = time.perf_counter_ns()
        for _ in range(num_runs):
            result = stage.run(step.kind, step.bucket, step.metadata, hidden)
        jax.block_until_ready(result)
        found.append((time.perf_counter_ns() - begun_ns) / num_runs / 1e6)
        if onward is not None:
            hidden = onward[step.kind, step.bucket](result)
    return tuple(found)


def _piped(config: Config, plan: Plan, num_stages: int) -> Config:
    """The configuration with a mesh of `num_stages` stages and few programs to compile."""
    return replace(
        config,
        prefill=replace(config.prefill, chunk_tokens=config.kv.block_size),
        decode=replace(config.decode, mesh=MeshShape(pipe=num_stages), max_slots=plan.pipeline_rows),
    )
