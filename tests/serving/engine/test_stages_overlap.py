"""Stages of a pipeline work at once: one is never held up by a later one's step of other slots."""

import asyncio
import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moonshard.serving.engine.programs import Programs
from moonshard.serving.engine.stage import Stage
from moonshard.serving.engine.steps import Step, StepKind
from moonshard.sharding.shape import MeshShape
from moonshard.sharding.shard import Shard
from tests.engine_room import programs

pytestmark = pytest.mark.xdist_group("jax")
HOLD_S = 60.0  # at most, where the test fails


def a_decode(executor: Programs, slot: int) -> Step:
    bucket = executor.shapes.decode_buckets[0]
    packed, fields = executor.shapes.layout(StepKind.DECODE, bucket).blank()
    fields["slot"][0, 0] = slot
    fields["positions"][0, 0] = 0
    sampling, draws = executor.shapes.layout(StepKind.DRAW).blank()
    draws["sample_slot"][0, 0], draws["num_rows"][0] = slot, 1
    return Step(-1, StepKind.DECODE, bucket, packed, sampling=sampling, draws=(0,))


@jax.jit
def busy(x: jax.Array) -> jax.Array:
    """`x`, about a second later: a program that calls back into Python runs in the thread that launches it, where all
    that it needs is there already."""
    turned = jax.lax.fori_loop(0, 400, lambda _, turned: jnp.tanh(turned @ turned), jnp.eye(256) * x.sum())
    return x + 0.0 * turned.sum()


class Gate:
    """The second stage's steps wait before it, on that stage's device. Open at first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.is_open = threading.Event()
        self.is_open.set()
        self.first_stage: list[jax.Array] = []  # what it gave, step by step
        run, programs = Stage.run, {}

        def pass_gate(hidden: np.ndarray) -> np.ndarray:
            assert self.is_open.wait(HOLD_S)
            return hidden

        def gated(stage: Stage, kind: StepKind, bucket: int, packed: np.ndarray, hidden: jax.Array | None) -> jax.Array:
            if hidden is None:
                self.first_stage.append(run(stage, kind, bucket, packed, None))
                return self.first_stage[-1]
            shape = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype)
            wait = programs.setdefault(bucket, jax.jit(lambda x: jax.pure_callback(pass_gate, shape, x)))
            there = jax.device_put(hidden, stage.blueprint.part.mesh.devices.flat[0])
            return run(stage, kind, bucket, packed, wait(busy(there)))

        monkeypatch.setattr(Stage, "run", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    found = Gate(monkeypatch)
    yield found
    found.is_open.set()


async def test_the_first_stage_runs_a_step_of_other_slots_while_the_last_one_is_held_up(gate: Gate):
    executor = programs(shard=Shard(mesh=MeshShape(pipe=2)))
    for slot in (0, 1):
        executor.fetch(executor.launch(a_decode(executor, slot)))  # all is compiled now
    gate.is_open.clear()
    first, second = (executor.launch(a_decode(executor, slot)) for slot in (0, 1))
    await asyncio.wait_for(asyncio.to_thread(jax.block_until_ready, gate.first_stage[-1]), HOLD_S / 2)
    assert not first.results[0].is_ready()  # pyright: ignore[reportAttributeAccessIssue]  # jax declares it nowhere
    gate.is_open.set()
    for launched in (first, second):
        executor.fetch(launched)
