"""Tries the sizes of the machine at hand, on a checkpoint."""

import subprocess
import sys
from collections.abc import Mapping

import msgspec

from moonshard.experiments.bench.sizes.record import SizesJob, TriedSizes
from moonshard.experiments.common.running.measurement import Plan
from moonshard.serving.config.keys import Config
from moonshard.serving.config.reading import as_overrides


def measure_sizes(config: Config, plan: Plan, environment: Mapping[str, str]) -> TriedSizes:
    """Tries them in a process of its own. CalledProcessError where that fails."""
    job = SizesJob(overrides=tuple(as_overrides(config)), repeats=plan.sizes_repeats, seed=0)
    argv = [sys.executable, "-m", "moonshard.experiments.bench.sizes.device"]
    ran = subprocess.run(
        argv, input=msgspec.json.encode(job), stdout=subprocess.PIPE, env=dict(environment), check=True
    )
    return msgspec.json.decode(ran.stdout, type=TriedSizes)
