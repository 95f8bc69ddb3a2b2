"""One engine that does both phases, and two that share its device: the same requests, open loop, token by token.

Everything runs on one event loop; each engine has two threads of its own that call the device. Apart, the first engine
prefills and draws each request's first token, its blocks leave right behind the step that completes them, and the
second engine decodes on. Blocks of the second are taken as a request comes, and its pool holds all of them at once:
waiting for room, leases and whatever goes wrong on a network are left out.

What it cannot show: both engines share one device and its one stream. On a GPU the kernels of both seem to take turns,
by how steps end: a host waits for the device inside of a step, where a loop's length is known on the device only, and
meanwhile the other one's kernels are queued; no trace of kernels was taken. So neither engine's steps take what they
would take alone. That long prompts no longer stand between two tokens, which is what two devices buy, is not
seen here; what a handoff costs is. Nothing of a gateway, a wire or a network is in any figure.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from moonshard.experiments.bench.gpu.serving.clients import Hear
from moonshard.experiments.bench.gpu.serving.engines import (
    EnginePair,
    Listeners,
    Receiver,
    SendingExecutor,
    Way,
    build_engine,
)
from moonshard.kv.blocks import BlockPool
from moonshard.serving.control.plan import Plan, PrefillPlan
from moonshard.serving.control.request import Request
from moonshard.serving.engine.device import StepDone
from moonshard.serving.engine.engine import Engine
from moonshard.serving.engine.events import StepReport

APART = "apart"  # the arm of two engines

type OnDone = Callable[[StepDone, Plan | None], None]


class Together:
    """One engine that both prefills and decodes."""

    def __init__(self, pair: EnginePair, chunk_tokens: int, hear: Hear, on_done: OnDone):
        pool = BlockPool(1, pair.sizes.num_blocks, pair.sizes.block_size)
        told = Listeners(on_step=hear, on_done=on_done)
        self._engine = build_engine(pair.first, pair.first.shapes, pool, chunk_tokens=chunk_tokens, told=told)

    @property
    def engines(self) -> tuple[Engine, ...]:
        return (self._engine,)

    def submit(self, request: Request) -> None:
        self._engine.submit(request)


@dataclass(eq=False, slots=True)
class _PrefillLeg:
    """A request between the two engines."""

    request: Request
    blocks: tuple[int, ...]  # of the decode engine, for its prompt
    num_exported: int = 0
    num_landing: int = 0  # given to the decode engine, which runs its steps in order
    first_token: int | None = None


class Apart:
    """One engine prefills, the other decodes. `num_prefill_blocks` is the pool of the first; None: all its pages.

    The fewer they are the sooner a block is written again: an export that came too late would show.
    """

    def __init__(
        self,
        pair: EnginePair,
        chunk_tokens: int,
        hear: Hear,
        on_done: OnDone,
        num_prefill_blocks: int | None = None,
    ):
        sizes, way = pair.sizes, Way()
        prefill_pool = BlockPool(1, num_prefill_blocks or sizes.num_blocks, sizes.block_size)
        self._pool = BlockPool(1, sizes.num_blocks, sizes.block_size)
        self._hear = hear
        self._legs: dict[bytes, _PrefillLeg] = {}
        self._prefill = build_engine(
            SendingExecutor(pair.first, way),
            pair.first.shapes,
            prefill_pool,
            chunk_tokens=chunk_tokens,
            told=Listeners(on_step=self._prefilled, on_prefill=self._export, on_done=on_done),
        )
        self._decode = build_engine(
            Receiver(pair.second, way),
            pair.second.shapes,
            self._pool,
            chunk_tokens=chunk_tokens,
            told=Listeners(on_step=hear, on_done=on_done),
        )

    @property
    def engines(self) -> tuple[Engine, ...]:
        return (self._prefill, self._decode)

    def submit(self, request: Request) -> None:
        blocks = self._pool.allocate(0, self._pool.num_blocks_for(len(request.prompt)))
        assert blocks is not None  # the pool holds all requests of a run
        self._legs[request.id] = _PrefillLeg(request, blocks)
        self._prefill.submit(replace(request, max_tokens=1))

    def _export(self, plan: PrefillPlan) -> None:
        """Called when a prefill step was launched: exports the blocks that it completes, right behind it."""
        for chunk in plan.chunks:
            leg = self._legs[chunk.request.id]
            num_whole = (chunk.start + len(chunk.tokens)) // self._pool.block_size
            end = len(leg.blocks) if chunk.samples else num_whole
            fresh = range(leg.num_exported, end)
            if fresh:
                leg.num_exported = end
                sources = [chunk.block_table[index] for index in fresh]
                self._prefill.export(0, sources, partial(self._land, leg, fresh))

    def _land(self, leg: _PrefillLeg, fresh: range, tickets: np.ndarray) -> None:
        self._decode.land(0, [leg.blocks[index] for index in fresh], tickets, lambda: None)
        leg.num_landing += len(fresh)
        self._join_if_ready(leg)

    def _prefilled(self, report: StepReport) -> None:
        self._hear(report)
        for emitted in report.emitted:
            leg = self._legs[emitted.output.sequence.request_id]
            (leg.first_token,) = emitted.output.token_ids
            self._join_if_ready(leg)

    def _join_if_ready(self, leg: _PrefillLeg) -> None:
        if leg.first_token is not None and leg.num_landing == len(leg.blocks):
            del self._legs[leg.request.id]
            self._decode.join(leg.request, 0, leg.blocks, (leg.first_token,), land_ms=0.0)
