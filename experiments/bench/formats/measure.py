"""Measures a checkpoint in each number format."""

from collections.abc import Mapping
from pathlib import Path

from moonshard.experiments.bench.floors.ceilings import measure_in_process
from moonshard.experiments.bench.formats.arms import arms_of
from moonshard.experiments.bench.formats.record import Formats, FormatsJob, FormatTimes
from moonshard.experiments.common.running.measurement import Plan
from moonshard.experiments.common.running.own_process import ask
from moonshard.serving.config.keys import Config
from moonshard.serving.config.reading import as_overrides

KERNEL_BATCHES = (1, 2, 4, 8)
CONTEXT_TOKENS = 192  # halfway through a stream of the part `peers`


def measure_formats(config: Config, plan: Plan, environment: Mapping[str, str], converted: Path) -> Formats:
    """Converts the folder into `converted` first, where that was not done before.

    Raises CheckpointError, ModelError or OSError of a folder that cannot be converted, and CalledProcessError of one of
    its processes.
    """
    job = FormatsJob(
        overrides=tuple(as_overrides(config)),
        arms=arms_of(config.model.path, converted),
        batches=plan.batches,
        kernel_batches=KERNEL_BATCHES,
        context_tokens=CONTEXT_TOKENS,
        prompt_tokens=plan.compared_prompts,
        repeats=plan.repeats,
        seed=0,
    )
    times = ask("experiments.bench.formats.device", job, tuple[FormatTimes, ...], environment)
    return Formats(ceilings=measure_in_process(environment), context_tokens=CONTEXT_TOKENS, times=times)
