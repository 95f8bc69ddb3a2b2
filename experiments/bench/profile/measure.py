"""Profiles the steps of a checkpoint, each part beside its share of what the machine reaches."""

import subprocess
import sys
from collections.abc import Mapping

import msgspec

from moonshard.experiments.bench.floors.ceilings import measure_in_process
from moonshard.experiments.bench.profile.record import Profile, ProfileJob, StepProfile
from moonshard.experiments.common.running.measurement import Plan
from moonshard.serving.config.keys import Config
from moonshard.serving.config.reading import as_overrides


def measure_profile(config: Config, plan: Plan, environment: Mapping[str, str]) -> Profile:
    """CalledProcessError of one of its processes."""
    job = ProfileJob(
        overrides=tuple(as_overrides(config)),
        batches=plan.batches,
        context_tokens=plan.compared_prompts[0],
        repeats=plan.repeats,
        seed=0,
    )
    argv = [sys.executable, "-m", "moonshard.experiments.bench.profile.device"]
    ran = subprocess.run(
        argv, input=msgspec.json.encode(job), stdout=subprocess.PIPE, env=dict(environment), check=True
    )
    steps = msgspec.json.decode(ran.stdout, type=tuple[StepProfile, ...])
    return Profile(ceilings=measure_in_process(environment), steps=steps)
