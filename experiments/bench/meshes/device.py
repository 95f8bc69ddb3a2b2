"""Questions about meshes, on virtual devices: `python -m moonshard.experiments.bench.meshes.device`, JSON in, JSON out.

A process of its own, since jax is told only once how many devices and threads it has. Reads a `MeshJob` on stdin and
writes a list of measurements on stdout.
"""

import sys
from dataclasses import dataclass
from typing import Literal

import msgspec

from moonshard.experiments.common.running.measurement import Measurement, Plan
from moonshard.serving.config.keys import Config
from moonshard.serving.config.reading import load_config
from moonshard.serving.deploy.startup import prepare_jax
from moonshard.sharding.shape import MeshShape

DEVICES = MeshShape(data=8)  # as many as the largest mesh has
Question = Literal["reshard", "collectives", "bubble"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshJob:
    overrides: tuple[str, ...]  # the whole configuration
    plan: Plan
    question: Question


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=MeshJob)
    config = load_config(None, job.overrides)
    prepare_jax(DEVICES)
    sys.stdout.buffer.write(msgspec.json.encode(_measure(config, job)))


def _measure(config: Config, job: MeshJob) -> list[Measurement]:
    """Answers the job's question. It imports jax, so the environment variables must be set before."""
    match job.question:
        case "reshard":
            from moonshard.experiments.bench.meshes.reshard import measure_reshard

            return measure_reshard(job.plan)
        case "collectives":
            from moonshard.experiments.bench.meshes.collectives import measure_collectives

            return measure_collectives(config)
        case "bubble":
            from moonshard.experiments.bench.meshes.bubble import measure_bubbles

            return measure_bubbles(config, job.plan)


if __name__ == "__main__":
    main()
