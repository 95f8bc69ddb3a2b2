"""What a follower runs: its part of the model, on a device thread, step by step as it is told. Needs jax."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from moonshard.rpc import link_pb2
from moonshard.serving.config.keys import Config, WorkerRole
from moonshard.serving.deploy.startup import ProcessStart
from moonshard.serving.engine.compiled.store import ProgramStore
from moonshard.serving.engine.device import DeviceThread, StepDone
from moonshard.serving.engine.loading.model import LoadedModel, Progress, load_model
from moonshard.serving.engine.programs import Drawn, Launched, Programs
from moonshard.serving.engine.steps import Step
from moonshard.serving.gang.steps import StepChain, digest_of, step_from

Serve = Callable[[asyncio.Queue[link_pb2.GangStep], asyncio.Queue[link_pb2.FollowerMessage]], Coroutine[Any, Any, None]]


def load(config: Config, role: WorkerRole, progress: Progress, start: ProcessStart) -> Serve:
    """Raises what `load_model` raises, and what `progress` does."""
    store = None if start.programs is None else ProgramStore(start.programs)
    model = load_model(config, role, progress, timings=start.timings, store=store)
    return Steps(model).run


@dataclass(frozen=True, slots=True)
class _FollowedPrograms:
    """Programs whose tokens nobody reads here but to compare them."""

    programs: Programs

    def launch(self, step: Step) -> Launched:
        return self.programs.launch(step)

    def fetch(self, launched: Launched) -> Drawn | np.ndarray | None:
        """What was drawn, as the devices gave it: whose row is whose only the leader knows."""
        jax.block_until_ready((launched.results, launched.scores, launched.guesses))
        return None if launched.step.sampling is None else np.asarray(launched.results[0])


class Steps:
    """The steps of one follower."""

    def __init__(self, model: LoadedModel):
        self._programs = model.programs
        self._num_partitions = model.shapes.num_partitions
        self._num_words = -(-model.vocab_size // 32)
        self._chain = StepChain()

    async def run(
        self, steps: asyncio.Queue[link_pb2.GangStep], outbox: asyncio.Queue[link_pb2.FollowerMessage]
    ) -> None:
        """Until a step is not the next one, or a launch fails: raises that."""
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[None] = loop.create_future()

        def tell(done: StepDone) -> None:
            drawn = b"" if done.exported is None else digest_of(done.exported)
            message = link_pb2.FollowerMessage(done=link_pb2.FollowerDone(number=done.number, drawn=drawn))
            loop.call_soon_threadsafe(outbox.put_nowait, message)

        def fail(error: BaseException) -> None:
            loop.call_soon_threadsafe(failed.set_exception, error)

        device = DeviceThread(_FollowedPrograms(self._programs), on_done=tell, on_failed=fail)
        device.start()
        while True:
            getting = asyncio.create_task(steps.get())
            await asyncio.wait({getting, failed}, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
            device.submit(self._step(getting.result()))

    def _step(self, message: link_pb2.GangStep) -> Step:
        self._chain.check(message)
        return step_from(message, num_partitions=self._num_partitions, num_words=self._num_words)
