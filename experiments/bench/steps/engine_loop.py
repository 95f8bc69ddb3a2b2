"""What the engine adds between two device steps: its own pace, the steps it overlaps, the gaps when the device idles.

In one process, without gateway or wire. The device side is the real one, with a stamp around each call.
"""

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from random import Random

import numpy as np

from moonshard.experiments.common.running.measurement import Measurement, Plan
from moonshard.serving.config.keys import Config
from moonshard.serving.control.batching.scheduler import Scheduler
from moonshard.serving.control.request import Request
from moonshard.serving.control.sampling_parameters import Sampling
from moonshard.serving.engine.encoder import StepEncoder
from moonshard.serving.engine.engine import Engine
from moonshard.serving.engine.events import NoEvents
from moonshard.serving.engine.loading.model import LoadedModel
from moonshard.serving.engine.programs import Drawn, Launched, Programs
from moonshard.serving.engine.steps import Step, StepKind


@dataclass(slots=True)
class Stamped:
    """An executor that remembers when each decode step was launched and when its tokens had arrived."""

    programs: Programs
    launched_ns: dict[int, int] = field(default_factory=dict)
    fetched_ns: dict[int, int] = field(default_factory=dict)

    def launch(self, step: Step) -> Launched:
        launched = self.programs.launch(step)
        if step.kind is StepKind.DECODE:
            self.launched_ns[step.number] = time.perf_counter_ns()
        return launched

    def fetch(self, launched: Launched) -> Drawn | np.ndarray | None:
        drawn = self.programs.fetch(launched)
        if launched.step.number in self.launched_ns:
            self.fetched_ns[launched.step.number] = time.perf_counter_ns()
        return drawn

    def pairs(self) -> list[tuple[int, int]]:
        """The numbers of decode steps that followed each other with nothing between them."""
        return [(number - 1, number) for number in self.fetched_ns if number - 1 in self.fetched_ns]

    def intervals_ms(self) -> list[float]:
        return [(self.fetched_ns[after] - self.fetched_ns[before]) / 1e6 for before, after in self.pairs()]

    def idle_ms(self) -> list[float]:
        """Time from one step's tokens on the host to the next step's launch; 0 where the launch came first."""
        return [max(0, self.launched_ns[after] - self.fetched_ns[before]) / 1e6 for before, after in self.pairs()]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRun:
    intervals_ms: list[float]
    idle_ms: list[float]
    overlapped_share: float


def measure_engine(config: Config, model: LoadedModel, plan: Plan, seed: int) -> list[Measurement]:
    found = []
    for batch in plan.batches:
        runs = [
            asyncio.run(_run_batch(config, model, batch, plan, Random(f"{seed} {batch} {repeat}")))
            for repeat in range(plan.repeats + 1)
        ][1:]
        found += _measurements(batch, runs)
    return found


def _measurements(batch: int, runs: list[BatchRun]) -> list[Measurement]:
    intervals_ms = tuple(sample for run in runs for sample in run.intervals_ms)
    idle_ms = tuple(sample for run in runs for sample in run.idle_ms)
    shares = tuple(run.overlapped_share for run in runs)
    return [
        Measurement(level="device", name=f"engine step, batch {batch}", unit="ms", samples=intervals_ms),
        Measurement(
            level="device", name=f"device idle between engine steps, batch {batch}", unit="ms", samples=idle_ms
        ),
        Measurement(
            level="device", name=f"overlapped decode steps, engine, batch {batch}", unit="share", samples=shares
        ),
    ]


async def _run_batch(config: Config, model: LoadedModel, batch: int, plan: Plan, random: Random) -> BatchRun:
    """A batch of equal requests from prompt to end, on an engine of its own."""
    stamped = Stamped(model.programs)
    engine = Engine(
        scheduler=Scheduler(model.scheduler_config(config), model.block_pool()),
        executor=stamped,
        encoder=StepEncoder(model.shapes),
        events=NoEvents(),
    )
    engine.start()
    for _ in range(batch):
        engine.submit(_request(random, model.vocab_size, plan))
    await _until_idle(engine)
    num_steps = engine.counters().totals.num_decode_steps
    await engine.close()
    engine.failed.cancel()
    return BatchRun(
        intervals_ms=stamped.intervals_ms(),
        idle_ms=stamped.idle_ms(),
        overlapped_share=engine.num_overlapped_steps / num_steps,
    )


async def _until_idle(engine: Engine) -> None:
    """Waits until the engine has nothing left. Raises what the device raised."""
    idle = asyncio.ensure_future(engine.wait_idle())
    await asyncio.wait({idle, engine.failed}, return_when=asyncio.FIRST_COMPLETED)
    if engine.failed.done():
        idle.cancel()
        engine.failed.result()


def _request(random: Random, vocab_size: int, plan: Plan) -> Request:
    return Request(
        id=secrets.token_bytes(16),
        prompt=tuple(random.randrange(vocab_size) for _ in range(plan.context_tokens[0])),
        sampling=Sampling(temperature=0.0),
        max_tokens=plan.completion_tokens,
    )
