"""Measures tiers in a process of its own: `python -m moonshard.experiments.bench.tiers.device`, JSON in, JSON out.

Reads a `TiersJob` on stdin; on stdout `TierTimes`.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from moonshard.experiments.bench.tiers.record import TiersJob, TierTimes
from moonshard.experiments.bench.tiers.ways import move
from moonshard.serving.config.reading import load_config
from moonshard.serving.deploy.startup import prepare_jax

if TYPE_CHECKING:
    from moonshard.serving.engine.loading.model import LoadedModel
    from moonshard.serving.engine.steps import Step


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=TiersJob)
    config = load_config(None, job.overrides)
    prepare_jax(config.decode.mesh)
    from moonshard.serving.engine.loading.model import load_model  # imports jax, which has been told all by now

    model = load_model(config, "both", lambda message: None)
    sys.stdout.buffer.write(msgspec.json.encode(_measure(model, job)))


def _measure(model: "LoadedModel", job: TiersJob) -> TierTimes:
    Path(job.folder).mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=job.folder) as folder:
        moved = move(model.block_bytes, job.num_blocks, job.repeats, Path(folder), job.seed)
    return TierTimes(
        block_tokens=model.block_size,
        block_bytes=model.block_bytes,
        moved=tuple(moved),
        land_s={number: _land(model, number, job) for number in job.num_blocks},
        compute_s={number: _compute(model, number, job) for number in job.num_blocks},
    )


def _compute(model: "LoadedModel", num_blocks: int, job: TiersJob) -> tuple[float, ...]:
    from moonshard.experiments.bench.steps.bare_steps import BareSteps

    steps = BareSteps(model, job.seed).prefill(0, num_blocks * model.block_size)
    return _seconds(model, steps, job.repeats)


def _land(model: "LoadedModel", num_blocks: int, job: TiersJob) -> tuple[float, ...]:
    from moonshard.serving.engine.encoder import StepEncoder

    encoder, most = StepEncoder(model.shapes), model.shapes.transfer_buckets[-1]
    block = model.layout.groups[0].block
    shape = (block.num_layers, block.block_size, block.num_features)
    payload = np.ones((num_blocks, *shape), np.dtype(block.dtype))
    places = [range(num_blocks)[first : first + most] for first in range(0, num_blocks, most)]
    steps = [encoder.encode_land(0, 0, place, payload[place.start : place.stop]) for place in places]
    return _seconds(model, steps, job.repeats)


def _seconds(model: "LoadedModel", steps: "Sequence[Step]", repeats: int) -> tuple[float, ...]:
    """All steps one after another, each launched before the one before is done; the first time is not counted."""
    from moonshard.experiments.bench.steps.bare_steps import run_steps

    found = []
    for _ in range(repeats + 1):
        began_s = time.perf_counter()
        run_steps(model.programs, steps)
        found.append(time.perf_counter() - began_s)
    return tuple(found[1:])


if __name__ == "__main__":
    main()
