"""The engine: a scheduler, a device thread, and the asyncio code that keeps a few steps in flight between them.

All of it runs on the event loop but the waiting: a finished step's tokens are handed over, the scheduler takes them,
and the step after next is launched. Nothing here blocks on the device, decides anything or knows a wire.
"""

import asyncio
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from moonshard.serving.counters import Counters
from moonshard.serving.device import DeviceThread, Executor, StepDone
from moonshard.serving.encoder import StepEncoder
from moonshard.serving.plan import CopyPlan, DecodePlan, Delivered, LoadPlan, Plan, PrefillPlan, Sampled
from moonshard.serving.programs import Drawn
from moonshard.serving.request import Output, Request, SequenceId
from moonshard.serving.scheduler import Scheduler
from moonshard.serving.steps import StepKind
from moonshard.serving.waiting import QueueTimeout

MIN_IN_FLIGHT = 2  # one runs, one waits behind it
SHORT_STEP_NS = 5_000_000
EXPIRY_PERIOD_S = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases:
    """Where one sequence's time went on this worker, in milliseconds."""

    queue_ms: float  # arrival to the launch of the first chunk
    prefill_ms: float  # launch of the first chunk to the first token on the host
    decode_ms: float  # first token on the host to the last


@dataclass(frozen=True, kw_only=True, slots=True)
class Emitted:
    """An output, with the phases it closed: on a sequence's first token and on its last."""

    output: Output
    phases: Phases | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one step produced, and which requests ended with it."""

    number: int
    emitted: tuple[Emitted, ...]
    ended: tuple[bytes, ...]


@dataclass(slots=True)
class _Clocked:
    """Stamps of one request, in nanoseconds of this process's clock."""

    arrived_ns: int
    launched_ns: int | None = None
    first_token_ns: dict[int, int] = field(default_factory=dict)  # by choice


class _Pace:
    """How many steps to keep in flight: two, or three while steps are short.

    Two short steps may both end while the event loop sends the tokens of the one before, and the device would wait.
    Where steps are long the loop is always in time, and a third would delay whoever arrives by its whole length. Side
    by side on two cores with steps of 0.3 to 1 ms, three gave 1.17, 1.03 and 1.07 times the tokens per second of 1, 8
    and 16 streams.
    """

    def __init__(self) -> None:
        self.max_in_flight = MIN_IN_FLIGHT
        self._last_done_ns = 0

    def note(self, done: StepDone) -> None:
        length_ns = done.done_ns - max(done.launched_ns, self._last_done_ns)
        self.max_in_flight = MIN_IN_FLIGHT + (length_ns < SHORT_STEP_NS)
        self._last_done_ns = done.done_ns


class Engine:
    """Serves requests on one device side. Every method runs on the event loop."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        encoder: StepEncoder,
        on_step: Callable[[StepReport], None],
        on_expired: Callable[[bytes, QueueTimeout], None],
    ):
        self._scheduler = scheduler
        self._encoder = encoder
        self._on_step = on_step
        self._on_expired = on_expired
        self._loop = asyncio.get_running_loop()
        self._device = DeviceThread(
            executor,
            on_done=functools.partial(self._on_loop, self._complete),
            on_failed=functools.partial(self._on_loop, self._fail),
        )
        self._plans: dict[int, Plan] = {}  # in flight
        self._clocks: dict[bytes, _Clocked] = {}
        self._num_computing = 0  # prefill and decode steps in flight
        self._pace = _Pace()
        self._idle = asyncio.Event()
        self._idle.set()
        self._expiry: asyncio.TimerHandle | None = None
        self.failed: asyncio.Future[None] = self._loop.create_future()  # the device, or the bookkeeping here
        self.num_overlapped_steps = 0

    def start(self) -> None:
        self._device.start()
        self._expire()

    def submit(self, request: Request) -> None:
        """Accepts a request. Raises what `Scheduler.add` raises."""
        self._scheduler.add(request, time.perf_counter())
        self._clocks[request.id] = _Clocked(arrived_ns=time.perf_counter_ns())
        self._idle.clear()
        self._guard(self._launch)

    def cancel(self, request_id: bytes) -> None:
        """Ends a request without a word. Its slot and blocks are free once what is in flight has run."""
        self._guard(self._end, request_id)

    async def wait_idle(self) -> None:
        """Until no request is left and nothing is in flight."""
        await self._idle.wait()

    async def close(self) -> None:
        """Ends the device threads once what was launched has run."""
        if self._expiry is not None:
            self._expiry.cancel()
        await asyncio.to_thread(self._device.close)

    def counters(self) -> Counters:
        return self._scheduler.counters()

    def _on_loop[T](self, handle: Callable[[T], None], what: T) -> None:
        """Called on the device's waiting thread."""
        self._loop.call_soon_threadsafe(self._guard, handle, what)

    def _guard[*Ts](self, handle: Callable[[*Ts], None], *what: *Ts) -> None:
        """A fault in the bookkeeping is one of the engine: no step would follow, and nobody would be told."""
        try:
            handle(*what)
        except Exception as error:  # whatever it was: what is held and what is in flight are then unknown
            self._fail(error)

    def _end(self, request_id: bytes) -> None:
        if self._scheduler.cancel(request_id):
            self._clocks.pop(request_id, None)
            self._launch()
            self._note_idle()

    def _launch(self) -> None:
        while self._num_computing < self._pace.max_in_flight and (plan := self._scheduler.schedule()) is not None:
            self._plans[plan.number] = plan
            self._num_computing += isinstance(plan, PrefillPlan | DecodePlan)
            if isinstance(plan, PrefillPlan):
                self._note_first_launch(plan)
            self._device.submit(self._encoder.encode(plan))

    def _note_first_launch(self, plan: PrefillPlan) -> None:
        for chunk in plan.chunks:
            clock = self._clocks.get(chunk.request.id)
            if clock is not None and clock.launched_ns is None:
                clock.launched_ns = time.perf_counter_ns()

    def _complete(self, done: StepDone) -> None:
        plan = self._plans.pop(done.number)
        self._num_computing -= isinstance(plan, PrefillPlan | DecodePlan)
        self.num_overlapped_steps += done.kind is StepKind.DECODE and done.was_overlapped
        self._pace.note(done)
        results = {} if done.drawn is None else _results(plan, done.drawn)
        delivered = self._scheduler.complete(done.number, results)
        self._drop_expired()
        self._launch()  # first, so that the device has work while the outputs are sent
        self._emit(done, delivered)
        self._note_idle()

    def _emit(self, done: StepDone, delivered: Delivered) -> None:
        if delivered.outputs:
            emitted = tuple(Emitted(output=o, phases=self._phases(o, done.done_ns)) for o in delivered.outputs)
            self._on_step(StepReport(number=done.number, emitted=emitted, ended=delivered.ended))
        for request_id in delivered.ended:
            self._clocks.pop(request_id, None)

    def _phases(self, output: Output, now_ns: int) -> Phases | None:
        clock = self._clocks[output.sequence.request_id]
        choice = output.sequence.choice
        is_first = choice not in clock.first_token_ns
        first_ns = clock.first_token_ns.setdefault(choice, now_ns)
        if not is_first and output.finish is None:
            return None
        launched_ns = clock.launched_ns if clock.launched_ns is not None else first_ns
        return Phases(
            queue_ms=(launched_ns - clock.arrived_ns) / 1e6,
            prefill_ms=(first_ns - launched_ns) / 1e6,
            decode_ms=(now_ns - first_ns) / 1e6,
        )

    def _drop_expired(self) -> None:
        for request_id, error in self._scheduler.expire(time.perf_counter()):
            self._clocks.pop(request_id, None)
            self._on_expired(request_id, error)

    def _expire(self) -> None:
        """Also while no step completes."""
        self._drop_expired()
        self._note_idle()
        self._expiry = self._loop.call_later(EXPIRY_PERIOD_S, self._guard, self._expire)

    def _note_idle(self) -> None:
        if self._scheduler.is_idle:
            self._idle.set()

    def _fail(self, error: BaseException) -> None:
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
    return {sequence: _sampled(drawn, row, request) for row, (sequence, request) in enumerate(owners)}


def _sampled(drawn: Drawn, row: int, request: Request) -> Sampled:
    num_top = request.num_logprobs
    logprobs = None if num_top is None else drawn.logprobs_of(row, num_top)
    return Sampled(token=int(drawn.tokens[row]), logprobs=logprobs)
