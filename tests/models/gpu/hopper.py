"""What tests of the kernels for Hopper cards share: an interpreter that finds races, and lowering without a card."""

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

INTERPRETED = plgpu.InterpretGPUParams(detect_races=True)
H100 = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="cuda")


def lower(run: Callable[..., object], *arguments: object) -> str:
    """As on a card: nothing is computed, and the kernels are lowered to what Mosaic compiles there."""
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=H100)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def distance(got: object, expected: object) -> float:
    """Of the norm; of nothing where all is expected to be 0."""
    ours, theirs = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(ours - theirs) / max(np.linalg.norm(theirs), 1e-30))


def races(said: str) -> int:
    """How many the interpreter has told of."""
    return said.count("RACE DETECTED")
