"""What leader and follower run is the same: steps as they are told, draws once their masks have come."""

import asyncio
import queue
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

from moonshard.rpc import link_pb2
from moonshard.serving.engine.programs import Launched
from moonshard.serving.engine.steps import DrawMasks, Step, StepKind
from moonshard.serving.gang.executor import GangExecutor
from moonshard.serving.gang.following import Steps
from moonshard.serving.gang.steps import GangDiverged, StepChain

VOCAB = 64
WORDS = np.arange(4, dtype=np.uint32).reshape(2, 2)  # masks of two draws
WAIT_S = 20.0


@dataclass
class ScriptedPrograms:
    """Notes what it launches, and the masks of its draws once it has them."""

    launched: "queue.SimpleQueue[int]" = field(default_factory=queue.SimpleQueue)
    masks: "queue.SimpleQueue[np.ndarray]" = field(default_factory=queue.SimpleQueue)
    has_last: bool = True

    def launch(self, step: Step) -> Launched:
        self.launched.put(step.number)
        if step.allowed is not None:
            self.masks.put(step.allowed())
        return Launched(step, (jnp.zeros((1, 1), jnp.int32),))

    def fetch(self, launched: Launched) -> None:
        return None


class Masks(DrawMasks):
    def __call__(self) -> np.ndarray:
        return WORDS

    def tell(self, tokens: np.ndarray, num_emitted: np.ndarray) -> None:
        raise AssertionError("nothing is drawn here")


class ScriptedGang:
    """What the leader told."""

    def __init__(self) -> None:
        self.told: list[link_pb2.LeaderMessage] = []
        self.num_done = 0

    def tell(self, message: link_pb2.LeaderMessage) -> None:
        self.told.append(link_pb2.LeaderMessage.FromString(message.SerializeToString()))

    def done(self, number: int, drawn: bytes) -> None:
        self.num_done += 1


def step(number: int, *, is_masked: bool = False) -> Step:
    rows = np.zeros((1, 2), np.int32)
    return Step(number, StepKind.DECODE, 1, rows, sampling=rows, allowed=Masks() if is_masked else None)


def told(*steps: Step) -> list[link_pb2.LeaderMessage]:
    """What a leader that runs these tells."""
    gang, programs = ScriptedGang(), ScriptedPrograms()
    leader = GangExecutor(cast(Any, programs), cast(Any, gang))
    for each in steps:
        leader.fetch(leader.launch(each))
    assert gang.num_done == len(steps)
    return gang.told


@asynccontextmanager
async def following(
    programs: ScriptedPrograms,
) -> AsyncIterator[tuple[asyncio.Queue[link_pb2.LeaderMessage], asyncio.Task[None]]]:
    """A follower's queue, and its run."""
    model = SimpleNamespace(
        held=[],
        programs=programs,
        shapes=SimpleNamespace(num_partitions=1),
        pool=SimpleNamespace(blocks_per_partition=1),
        vocab_size=VOCAB,
        dtype="float32",
        kernels="xla",
        fingerprint="f",
    )
    heard: asyncio.Queue[link_pb2.LeaderMessage] = asyncio.Queue()
    running = asyncio.create_task(Steps(cast(Any, model), None, None).run(heard, asyncio.Queue()))
    try:
        yield heard, running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def fault(running: asyncio.Task[None]) -> str:
    with pytest.raises(GangDiverged) as raised:
        await asyncio.wait_for(running, WAIT_S)
    return str(raised.value)


async def next_of[T](found: "queue.SimpleQueue[T]") -> T:
    return await asyncio.to_thread(found.get, timeout=WAIT_S)


async def test_a_follower_launches_a_step_at_once_and_draws_when_its_masks_come():
    programs = ScriptedPrograms()
    first, masks, second = told(step(7, is_masked=True), step(8))
    async with following(programs) as (heard, _):
        heard.put_nowait(first)
        assert await next_of(programs.launched) == 7
        assert programs.masks.empty()
        for message in (masks, second):
            heard.put_nowait(message)
        assert (await next_of(programs.masks)).tolist() == WORDS.tolist()
        assert await next_of(programs.launched) == 8


async def test_a_step_in_front_of_the_masks_of_the_last_one_ends_the_follower():
    chain, messages = StepChain(), [link_pb2.GangStep(metadata=bytes(8), kind="decode", is_masked=True) for _ in "ab"]
    async with following(ScriptedPrograms()) as (heard, running):
        for message in messages:
            chain.seal(message)
            heard.put_nowait(link_pb2.LeaderMessage(step=message))
        assert "before the masks of the one before it" in await fault(running)


async def test_masks_that_no_step_waits_for_end_the_follower():
    chain, message = StepChain(), link_pb2.GangMasks(allowed=bytes(8))
    async with following(ScriptedPrograms()) as (heard, running):
        chain.seal(message)
        heard.put_nowait(link_pb2.LeaderMessage(masks=message))
        assert "for a step that has none" in await fault(running)


@pytest.mark.parametrize("what", ["order", "tier_order"])
async def test_an_order_for_what_a_follower_does_not_have_ends_it(what: str):
    async with following(ScriptedPrograms()) as (heard, running):
        message = link_pb2.LeaderMessage()
        getattr(message, what).SetInParent()
        heard.put_nowait(message)
        assert await fault(running) == f"the leader tells of what is not here: {what}"


async def test_a_land_of_what_did_not_come_ends_the_follower():
    chain, message = StepChain(), link_pb2.GangStep(metadata=bytes(8), kind="land", ticket=4)
    async with following(ScriptedPrograms()) as (heard, running):
        chain.seal(message)
        heard.put_nowait(link_pb2.LeaderMessage(step=message))
        assert await fault(running) == "step 0 lands what was not copied out"
