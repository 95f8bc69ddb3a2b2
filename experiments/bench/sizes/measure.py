"""Tries the sizes of the machine at hand, on a checkpoint."""

from collections.abc import Mapping

from moonshard.experiments.bench.sizes.record import SizesJob, TriedSizes
from moonshard.experiments.common.running.measurement import Plan
from moonshard.experiments.common.running.own_process import ask
from moonshard.serving.config.keys import Config
from moonshard.serving.config.reading import as_overrides


def measure_sizes(config: Config, plan: Plan, environment: Mapping[str, str]) -> TriedSizes:
    """Tries them in a process of its own. CalledProcessError where that fails."""
    job = SizesJob(overrides=tuple(as_overrides(config)), repeats=plan.sizes_repeats, seed=0)
    return ask("experiments.bench.sizes.device", job, TriedSizes, environment)
