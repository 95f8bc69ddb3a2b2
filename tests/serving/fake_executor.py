"""An engine over a device that computes nothing: for faults, orders and callbacks, where tokens do not matter."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from moonshard.kv.blocks import BlockPool
from moonshard.serving.control.batching.scheduler import Scheduler, SchedulerConfig
from moonshard.serving.engine.encoder import StepEncoder
from moonshard.serving.engine.engine import Engine
from moonshard.serving.engine.programs import Drawn, Launched
from moonshard.serving.engine.steps import Step, StepKind, StepShapes
from tests.listeners import Listeners
from tests.serving.control.batching.stepping import Guesser

BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS, CONTEXT_TOKENS, TILE = 16, 8, 2, 64, 16


class FakeExecutor:
    """Draws token 7 for every row of every step, and exports each block as its own number.

    `launched` are the steps in their order. `fetch` is called with each step's number, and may block or raise. How many
    tokens the rows of a verification emit, one after another and at most `q_len`, `num_emitted` says.
    """

    def __init__(
        self,
        fetch: Callable[[int], None] = lambda number: None,
        q_len: int = 1,
        num_emitted: Iterator[int] | None = None,
    ):
        self._fetch = fetch
        self.q_len = q_len
        self._num_emitted = num_emitted or itertools.repeat(1)
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
            case StepKind.PREFILL:
                return self._draw([1] * len(step.draws))
            case StepKind.DECODE:
                return self._draw([1] * len(step.draws))
            case StepKind.VERIFY:
                fields = some_shapes(self.q_len).layout(step.kind, step.bucket).views(step.metadata)
                q_lens = fields["q_len"][0].tolist()
                return self._draw([min(q_lens[row], next(self._num_emitted)) for row in step.draws])
            case _:
                return None

    def _draw(self, num_emitted: list[int]) -> Drawn:
        shape = (len(num_emitted), self.q_len)
        tokens, empty = np.full(shape, 7, np.int32), np.zeros((*shape, 0))
        return Drawn(np.array(num_emitted, np.int32), tokens, np.zeros(shape), empty.astype(np.int32), empty)


def some_shapes(q_len: int = 1) -> StepShapes:
    return StepShapes(
        slots_per_partition=NUM_SLOTS,
        columns_per_sequence=CONTEXT_TOKENS // BLOCK_SIZE,
        max_context_tokens=CONTEXT_TOKENS,
        q_tile=TILE,
        q_len=q_len,
        prefill_buckets=(TILE,),
        decode_buckets=(1, NUM_SLOTS),
        transfer_buckets=(1, 4),
    )


def an_engine(
    executor: FakeExecutor,
    pool: BlockPool | None = None,
    **listeners: Any,
) -> Engine:
    """`listeners` are fields of `Listeners`."""
    config = SchedulerConfig(
        slots_per_partition=NUM_SLOTS,
        chunk_tokens=TILE,
        q_tile=TILE,
        q_len=executor.q_len,
        max_context_tokens=CONTEXT_TOKENS,
        max_queued_requests=8,
        queue_timeout_s=10.0,
    )
    return Engine(
        scheduler=Scheduler(config, pool or BlockPool(1, NUM_BLOCKS, BLOCK_SIZE), lambda request, choice: Guesser()),
        executor=executor,
        encoder=StepEncoder(some_shapes(executor.q_len)),
        events=Listeners(**listeners),
    )
