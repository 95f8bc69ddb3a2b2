"""Measures tiers on a checkpoint."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from moonshard.experiments.bench.tiers.record import TiersJob, TierTimes
from moonshard.experiments.common.running.measurement import Plan
from moonshard.experiments.common.running.own_process import ask
from moonshard.serving.config.keys import Config
from moonshard.serving.config.reading import as_overrides


def measure_tiers(config: Config, plan: Plan, environment: Mapping[str, str], folder: Path) -> TierTimes:
    """Measures them in a process of its own, whose files lie under `folder`. CalledProcessError where that fails."""
    kv = replace(config.kv, store=replace(config.kv.store, enabled=True))  # so that there are programs that land blocks
    decode = replace(config.decode, max_slots=1)  # whose sequence may take the whole pool
    job = TiersJob(
        overrides=tuple(as_overrides(replace(config, mode="aggregated", kv=kv, decode=decode))),
        folder=str(folder.absolute()),
        num_blocks=plan.tier_blocks,
        repeats=plan.tier_repeats,
        seed=0,
    )
    return ask("experiments.bench.tiers.device", job, TierTimes, environment)
