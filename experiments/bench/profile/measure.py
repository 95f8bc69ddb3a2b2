"""Profiles the steps of a checkpoint, each part beside its share of what the machine reaches."""

from collections.abc import Mapping

from moonshard.experiments.bench.floors.ceilings import measure_in_process
from moonshard.experiments.bench.profile.record import Profile, ProfileJob, StepProfile
from moonshard.experiments.common.running.measurement import Plan
from moonshard.experiments.common.running.own_process import ask
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
    steps = ask("experiments.bench.profile.device", job, tuple[StepProfile, ...], environment)
    return Profile(ceilings=measure_in_process(environment), steps=steps)
