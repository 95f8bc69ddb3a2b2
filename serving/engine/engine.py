"""The engine: a scheduler, a device thread, and the asyncio code that keeps a few steps in flight between them.

All of it runs on the event loop but the waiting: a finished step's tokens are handed over, the scheduler takes them,
and the step after next is launched. Nothing here blocks on the device, decides anything or knows a wire.
"""

import asyncio
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from moonshard.serving.constrained.grammars import GrammarError
from moonshard.serving.constrained.masks import LateMasks, Masks, Place, no_masks
from moonshard.serving.control.batching.counters import Counters
from moonshard.serving.control.batching.queue import NeverFits
from moonshard.serving.control.batching.scheduler import Scheduler
from moonshard.serving.control.plan import CopyPlan, DecodePlan, Delivered, LoadPlan, Plan, PrefillPlan, Sampled
from moonshard.serving.control.request import Logprobs, Output, Request, SequenceId
from moonshard.serving.engine.clocks import RequestClocks
from moonshard.serving.engine.device import DeviceThread, Executor, StepDone
from moonshard.serving.engine.encoder import StepEncoder
from moonshard.serving.engine.events import Emitted, EngineEvents, StepReport
from moonshard.serving.engine.exchange import BlockExchange
from moonshard.serving.engine.pace import Pace
from moonshard.serving.engine.programs import Drawn
from moonshard.serving.engine.scoring.prompts import PromptScores
from moonshard.serving.engine.steps import Step, StepKind

EXPIRY_PERIOD_S = 0.25


class Engine:
    """Serves requests on one device side. Every method runs on the event loop."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        encoder: StepEncoder,
        events: EngineEvents,
        masks: Masks | None = None,
        num_stages: int = 1,
    ):
        self._scheduler = scheduler
        self._encoder = encoder
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._device = DeviceThread(
            executor,
            on_done=functools.partial(self._on_loop, self._complete),
            on_failed=functools.partial(self._on_loop, self.fail),
        )
        self._masks = masks or no_masks()
        self._plans: dict[int, Plan] = {}  # in flight
        self._late: dict[int, LateMasks] = {}  # of those with constrained rows
        self._exchange = BlockExchange(encoder, self._device.submit)
        self._clocks = RequestClocks()
        self._scores = PromptScores()
        self._num_computing = 0  # prefill and decode steps in flight
        self._is_launching = False
        self._pace = Pace(num_stages)
        self._idle = asyncio.Event()
        self._idle.set()
        self._expiry: asyncio.TimerHandle | None = None
        self.failed: asyncio.Future[None] = self._loop.create_future()  # the device, or the bookkeeping here
        self.num_overlapped_steps = 0

    def start(self) -> None:
        self._device.start()
        self._expire()

    def submit(
        self,
        request: Request,
        resumed: Mapping[int, tuple[int, ...]] | None = None,
        partition: int | None = None,
    ) -> None:
        """Accepts a request, in `partition` if that is named. `resumed`: only these choices go on, each after these
        tokens.

        Raises what `Scheduler.add` raises, and NeverFits for a grammar that does not compile.
        """
        places = self._places(request, resumed or dict.fromkeys(range(request.n), ()))
        self._scheduler.add(request, time.perf_counter(), resumed, partition)
        self._masks.take(request.id, places)
        self._clocks.start(request.id, time.perf_counter_ns())
        self._scores.begin(request)
        self.wake()

    def join(
        self,
        request: Request,
        partition: int,
        block_table: tuple[int, ...],
        tokens: tuple[int, ...],
        guesses: tuple[tuple[int, ...], ...] = (),
        *,
        land_ms: float,
    ) -> bool:
        """Decodes a request whose prompt's KV is in these blocks, as `Scheduler.join` says. False: it is over already.

        `land_ms`, how long its KV took to land, becomes one of its phases.
        """
        places = self._places(request, {choice: (token,) for choice, token in enumerate(tokens)})
        is_running = self._scheduler.join(request, partition, block_table, tokens, guesses)
        if is_running:
            self._masks.take(request.id, places)
            self._clocks.start(request.id, time.perf_counter_ns(), land_ms=land_ms)
        self.wake()
        return is_running

    def export(
        self,
        partition: int,
        blocks: Sequence[int],
        on_done: Callable[[np.ndarray], None],
        ticket: int | None = None,
    ) -> None:
        """Reads blocks behind all that was launched; `on_done` gets [len(blocks), layers, block_size, features].

        Nothing launched later is seen in it. At least one block; an error of `on_done` is a fault of the engine. Of a
        gang each member reads what its devices carry; `ticket` is what they all call these blocks.
        """
        self._exchange.export(partition, blocks, on_done, ticket)
        self._idle.clear()

    def land(
        self,
        partition: int,
        blocks: Sequence[int],
        payload: np.ndarray,
        on_done: Callable[[], None],
        ticket: int | None = None,
    ) -> None:
        """Overwrites blocks with `payload`, shaped and typed as `export` gives it, before all that is launched later.

        `payload` must not change until `on_done`. At least one block; an error of `on_done` is a fault of the engine.
        `ticket`: as in `export`.
        """
        self._exchange.land(partition, blocks, payload, on_done, ticket)
        self._idle.clear()

    def wake(self) -> None:
        """Launches what can be launched. To be called by whoever gave blocks back to the pool without the engine."""
        self._idle.clear()
        self.guard(self._launch)
        self.guard(self._note_idle)

    def cancel(self, request_id: bytes) -> None:
        """Ends a request without any output for it. Its slot and blocks are free once what is in flight has run."""
        self.guard(self._end, request_id)

    async def wait_idle(self) -> None:
        """Until no request is left and nothing is in flight, no export and no land either."""
        await self._idle.wait()

    async def close(self) -> None:
        """Ends the device threads once what was launched has run."""
        if self._expiry is not None:
            self._expiry.cancel()
        await asyncio.to_thread(self._device.close)

    @property
    def num_scoring(self) -> int:
        """Requests whose prompt's log-probabilities are kept here, until their first token."""
        return len(self._scores)

    def counters(self) -> Counters:
        return self._scheduler.counters()

    def _on_loop[T](self, handle: Callable[[T], None], what: T) -> None:
        """Called on the device's waiting thread."""
        self._loop.call_soon_threadsafe(self.guard, handle, what)

    def guard[*Ts](self, handle: Callable[[*Ts], None], *what: *Ts) -> None:
        """An error in the bookkeeping is a fault of the engine: else no step would follow, and nobody would be told."""
        try:
            handle(*what)
        except Exception as error:  # whatever it was: what is held and what is in flight are then unknown
            self.fail(error)

    def _end(self, request_id: bytes) -> None:
        if self._drop(request_id):
            self._launch()
            self._note_idle()

    def _drop(self, request_id: bytes) -> bool:
        is_here = self._scheduler.cancel(request_id)
        if is_here:
            self._forget(request_id)
        return is_here

    def _forget(self, request_id: bytes) -> None:
        self._clocks.forget(request_id)
        self._scores.forget(request_id)
        self._masks.forget(request_id)

    def _places(self, request: Request, generated: Mapping[int, tuple[int, ...]]) -> Mapping[int, Place]:
        try:
            return self._masks.places(request.grammar, generated) if request.grammar else {}
        except GrammarError as error:
            raise NeverFits("grammar", str(error)) from error

    def _launch(self) -> None:
        """Launches as many steps as may be in flight. A launch that a listener asks for during a launch follows when
        that one is done.
        """
        if self._is_launching:
            return
        self._is_launching = True
        try:
            while self._num_computing < self._pace.max_in_flight and (plan := self._scheduler.schedule()) is not None:
                self._submit(plan)
        finally:
            self._is_launching = False

    def _submit(self, plan: Plan) -> None:
        self._plans[plan.number] = plan
        self._num_computing += isinstance(plan, PrefillPlan | DecodePlan)
        self._clocks.note_launch(plan, time.perf_counter_ns())
        if isinstance(plan, PrefillPlan):
            self._events.before_prefill(plan)
            self._device.submit(self._encode(plan))
            self._events.on_prefill(plan)
        else:
            self._device.submit(self._encode(plan))

    def _encode(self, plan: Plan) -> Step:
        step = self._encoder.encode(plan)
        if (late := self._masks.late(plan, step.draws)) is None:
            return step
        self._late[plan.number] = late
        return dataclasses.replace(step, allowed=late)

    def _complete(self, done: StepDone) -> None:
        if self._exchange.owns(done.number):
            self._complete_exchange(done)
        else:
            self._complete_plan(done)
        self._note_idle()

    def _complete_exchange(self, done: StepDone) -> None:
        self._pace.skip(done)
        self._exchange.complete(done)
        self._launch()  # blocks may have come back with it
        self._events.on_done(done, None)

    def _complete_plan(self, done: StepDone) -> None:
        plan = self._plans.pop(done.number)
        self._num_computing -= isinstance(plan, PrefillPlan | DecodePlan)
        self.num_overlapped_steps += done.kind is StepKind.DECODE and done.was_overlapped
        self._pace.note(done)
        if (late := self._late.pop(done.number, None)) is not None:
            self._turn_down(late.faults)
        results = {} if done.drawn is None else _results(plan, done.drawn)
        delivered = self._scheduler.complete(done.number, results)
        if isinstance(plan, PrefillPlan) and any(chunk.is_scored for chunk in plan.chunks):
            delivered = self._with_scores(plan, done, delivered)
        if late is not None:
            for output in delivered.outputs:
                if output.finish is not None:
                    self._masks.end(output.sequence)
        self._drop_expired()
        self._launch()  # first, so that the device has work while the outputs are sent
        self._emit(done, delivered)
        self._events.on_done(done, plan)

    def _with_scores(self, plan: PrefillPlan, done: StepDone, delivered: Delivered) -> Delivered:
        """The log-probabilities of a prompt go with the first token behind it."""
        assert done.drawn is not None  # as of every step with scores
        assert done.drawn.scores is not None
        self._scores.take(plan, done.drawn.scores)
        ending = {chunk.sequence: chunk.request for chunk in plan.chunks if chunk.is_scored and chunk.samples}

        def told(output: Output) -> Output:
            request = ending.get(output.sequence)
            return output if request is None else output._replace(prompt_logprobs=self._scores.pop(request))

        return dataclasses.replace(delivered, outputs=tuple(map(told, delivered.outputs)))

    def _emit(self, done: StepDone, delivered: Delivered) -> None:
        if delivered.outputs:
            phases, done_ns = self._clocks.phases, done.done_ns
            emitted = tuple([Emitted(output, phases(output, done_ns)) for output in delivered.outputs])
            self._events.on_step(StepReport(number=done.number, emitted=emitted, ended=delivered.ended))
        for request_id in delivered.ended:
            self._forget(request_id)

    def _turn_down(self, faults: Mapping[SequenceId, Place]) -> None:
        """Ends requests that cannot keep to their grammar any longer, before what was drawn for them is handed on."""
        for sequence, place in faults.items():
            if self._masks.has(sequence, place) and self._drop(sequence.request_id):
                self._events.on_turned_down(sequence.request_id, NeverFits("grammar", place.fault or ""))

    def _drop_expired(self) -> None:
        for request_id, error in self._scheduler.expire(time.perf_counter()):
            self._forget(request_id)
            self._events.on_turned_down(request_id, error)

    def _expire(self) -> None:
        """Runs on a timer, so that requests expire while no step completes too."""
        self._drop_expired()
        self._note_idle()
        self._expiry = self._loop.call_later(EXPIRY_PERIOD_S, self.guard, self._expire)

    def _note_idle(self) -> None:
        if self._scheduler.is_idle and self._exchange.is_idle:
            self._idle.set()

    def fail(self, error: BaseException) -> None:
        self._masks.close()  # nobody tells the device thread anything more
        if not self.failed.done():
            self.failed.set_exception(error)


def _results(plan: Plan, drawn: Drawn) -> dict[SequenceId, Sampled]:
    """Which row of the step's tokens belongs to whom: the rows follow the plan's order."""
    match plan:
        case DecodePlan(rows=rows):
            owners = [(row.sequence, row.request) for row in rows]
        case PrefillPlan(chunks=chunks):
            owners = [(sequence, chunk.request) for chunk in chunks for sequence, _ in chunk.samples]
        case LoadPlan() | CopyPlan():
            owners = []
    guesses = [()] * len(owners) if drawn.guesses is None else _guesses(plan, drawn.guesses)
    drawn_rows = zip(owners, drawn.tokens.tolist(), drawn.num_emitted.tolist(), guesses, strict=True)
    return {
        sequence: Sampled(tuple(tokens[:count]), _logprobs(drawn, row, request.num_logprobs), guessed)
        for row, ((sequence, request), tokens, count, guessed) in enumerate(drawn_rows)
    }


def _guesses(plan: Plan, guesses: np.ndarray) -> list[tuple[int, ...]]:
    """What the draft model guesses behind each row. Who forks from a prefill has none yet: its token is another."""
    found: list[tuple[int, ...]] = [tuple(row) for row in guesses.tolist()]
    if isinstance(plan, PrefillPlan):
        is_first = [not index for chunk in plan.chunks for index in range(len(chunk.samples))]
        return [row if first else () for row, first in zip(found, is_first, strict=True)]
    return found


def _logprobs(drawn: Drawn, row: int, num_top: int | None) -> tuple[Logprobs, ...]:
    if num_top is None:
        return ()
    return tuple(drawn.logprobs_of(row, index, num_top) for index in range(drawn.num_emitted[row]))
