"""An engine over a device that computes nothing: for faults, orders and callbacks, where tokens do not matter."""

from collections.abc import Callable
from typing import Any

import numpy as np

from moonshard.kv.blocks import BlockPool
from moonshard.serving.control.batching.scheduler import Scheduler, SchedulerConfig
from moonshard.serving.engine.encoder import StepEncoder
from moonshard.serving.engine.engine import Engine
from moonshard.serving.engine.programs import Drawn, Launched
from moonshard.serving.engine.steps import Step, StepKind, StepShapes
from tests.listeners import Listeners

BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS, CONTEXT_TOKENS, TILE = 16, 8, 2, 64, 16


class FakeExecutor:
    """Draws token 7 for every row of every step, and exports each block as its own number.

    `launched` are the steps in their order. `fetch` is called with each step's number, and may block or raise.
    """

    def __init__(self, fetch: Callable[[int], None] = lambda number: None):
        self._fetch = fetch
        self.launched: list[Step] = []

    @property
    def kinds(self) -> list[StepKind]:
        return [step.kind for step in self.launched]

    def launch(self, step: Step) -> Launched:
        self.launched.append(step)
        return Launched(step, ())

    def fetch(self, launched: Launched) -> Drawn | np.ndarray | None:
        step = launched.step
        self._fetch(step.number)
        match step.kind:
            case StepKind.EXPORT:
                return step.metadata[0].astype(np.float32).reshape(-1, 1, 1, 1)
            case StepKind.PREFILL | StepKind.DECODE:
                empty = np.zeros((NUM_SLOTS, 0))
                tokens = np.full(NUM_SLOTS, 7)
                return Drawn(tokens, np.zeros(NUM_SLOTS), empty.astype(np.int32), empty)
            case _:
                return None


def an_engine(
    executor: FakeExecutor,
    pool: BlockPool | None = None,
    **listeners: Any,
) -> Engine:
    """`listeners` are fields of `Listeners`."""
    shapes = StepShapes(
        slots_per_partition=NUM_SLOTS,
        blocks_per_sequence=CONTEXT_TOKENS // BLOCK_SIZE,
        max_context_tokens=CONTEXT_TOKENS,
        q_tile=TILE,
        prefill_buckets=(TILE,),
        decode_buckets=(1, NUM_SLOTS),
        transfer_buckets=(1, 4),
    )
    config = SchedulerConfig(
        slots_per_partition=NUM_SLOTS,
        chunk_tokens=TILE,
        q_tile=TILE,
        max_context_tokens=CONTEXT_TOKENS,
        max_queued_requests=8,
        queue_timeout_s=10.0,
    )
    return Engine(
        scheduler=Scheduler(config, pool or BlockPool(1, NUM_BLOCKS, BLOCK_SIZE)),
        executor=executor,
        encoder=StepEncoder(shapes),
        events=Listeners(**listeners),
    )
