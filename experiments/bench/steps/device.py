"""The device level in a process of its own: `python -m moonshard.experiments.bench.steps.device`, JSON in, JSON out.

A process of its own, so that the one that drives the load and keeps the clock never imports jax, and so that the next
round starts from the same state. Reads a `Job` on stdin; on stdout a list of measurements.
"""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from moonshard.experiments.common.running.measurement import Measurement, Plan
from moonshard.serving.config.keys import Config
from moonshard.serving.config.reading import load_config
from moonshard.serving.deploy.startup import prepare_jax

if TYPE_CHECKING:
    from moonshard.serving.engine.loading.model import LoadedModel

Part = Literal["steps", "engine", "kv"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    overrides: tuple[str, ...]  # the whole configuration
    plan: Plan
    parts: tuple[Part, ...]
    seed: int


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    config = load_config(None, job.overrides)
    prepare_jax(config.decode.mesh)
    sys.stdout.buffer.write(msgspec.json.encode(_measure(config, job)))


def _measure(config: Config, job: Job) -> list[Measurement]:
    """Does the job. It imports jax, so the environment variables must be set before."""
    from moonshard.experiments.bench.steps.bare_steps import measure_bare_steps
    from moonshard.experiments.bench.steps.engine_loop import measure_engine
    from moonshard.serving.engine.loading.model import load_model

    model = load_model(config, "both", lambda message: None)
    found: list[Measurement] = []
    if "steps" in job.parts:
        found += measure_bare_steps(model, job.plan, job.seed)
    if "engine" in job.parts:
        found += measure_engine(config, model, job.plan, job.seed)
    if "kv" in job.parts:
        found += _measure_writes(config, model, job.plan)
    return found


def _measure_writes(config: Config, model: "LoadedModel", plan: Plan) -> list[Measurement]:
    from moonshard.experiments.bench.steps.kv_write import measure_writes
    from moonshard.models.registry import open_model
    from moonshard.sharding.mesh import build_mesh, replicated

    _, served = open_model(config.model.path)
    return [
        each
        for group in served.kv_groups(model.dtype)
        for each in measure_writes(
            group,
            num_blocks=model.pool.num_partitions * model.pool.blocks_per_partition,
            block_size=model.block_size,
            num_slots=model.pool.num_slots,
            sharding=replicated(build_mesh(config.decode.mesh)),
            repeats=plan.repeats,
        )
    ]


if __name__ == "__main__":
    main()
