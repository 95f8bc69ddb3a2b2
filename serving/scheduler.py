"""Which step runs next: continuous batching with chunked prefill, preemption and forks, as a pure state machine.

Stands apart from the engine so that a laptop or a simulator runs the very object that serves. Three verbs drive it:
`add` accepts a request, `schedule` decides a step and counts it as launched, `complete` takes a step's results, in
launch order. Steps may be launched before the results of earlier ones are known; the device feeds each drawn token to
the next step itself. Everything follows from four rules:

- Oldest first. The queue is never overtaken, growth preempts the youngest of the partition, and the oldest of all is
  never preempted: something always finishes.
- Growth before admission. Running sequences take the blocks they need next before anyone enters, so that a preempted
  sequence cannot take back at once what it had to give.
- One prefill at a time is unfinished. A step's budget is spent in order, so at most one sequence is cut by its end.
- What a launched step uses stays held until that step has completed, whatever happened meanwhile.

Left out: token values, sampling, stop strings, routing, and the clock, which is an argument.
Sources: Orca (OSDI 2022), PagedAttention (arXiv:2309.06180), Sarathi-Serve (arXiv:2403.02310).
"""

import itertools
from collections import deque
from dataclasses import dataclass, replace

from moonshard.kv.blocks import BlockPool, PartitionCounts
from moonshard.serving.counters import Counters, Totals
from moonshard.serving.plan import (
    CopyPlan,
    DecodePlan,
    Delivered,
    Plan,
    PrefillChunk,
    PrefillPlan,
    Results,
    Sampled,
    needs_slot_state,
)
from moonshard.serving.request import Output, Request
from moonshard.serving.residents import Residents
from moonshard.serving.sequence import Accepted, Phase, Sequence, Stay
from moonshard.serving.waiting import NeverFits, QueueTimeout, WaitingLine, check_fits


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """`chunk_tokens` is the budget of a prefill step, in which each sequence's chunk counts padded to `q_tile`."""

    slots_per_partition: int
    chunk_tokens: int
    q_tile: int = 1
    max_prefill_sequences: int = 8
    max_context_tokens: int
    max_queued_requests: int
    queue_timeout_s: float

    def __post_init__(self) -> None:
        if min(self.slots_per_partition, self.q_tile, self.max_prefill_sequences, self.max_queued_requests) < 1:
            raise ValueError("slots, tile, sequences of a prefill step and queue are at least 1")
        if self.chunk_tokens < 1 or self.chunk_tokens % self.q_tile:
            raise ValueError(f"chunk_tokens {self.chunk_tokens} is not a multiple of q_tile {self.q_tile}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """A plan, the stays it uses, and those it draws a token for."""

    plan: Plan
    stays: tuple[Stay, ...]
    drawing: tuple[Stay, ...] = ()


class Scheduler:
    """The step loop's decisions for one worker that prefills and decodes."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool):
        self.config = config
        self._pool = pool
        self._residents = Residents(pool, config.slots_per_partition)
        self._accepted: dict[bytes, Accepted] = {}
        self._waiting = WaitingLine(config.max_queued_requests, config.queue_timeout_s)
        self._prefilling: Stay | None = None  # the one whose prefill the last budget cut
        self._is_decode_next = False
        self._outbox: deque[_Step] = deque()  # decided, not handed out
        self._in_flight: deque[_Step] = deque()  # handed out, not completed
        self._arrivals = itertools.count()
        self._numbers = itertools.count()
        self._totals = Totals()

    # ---- requests come and go

    def add(self, request: Request, now_s: float) -> None:
        """Accept a request. Raises NeverFits or QueueFull, and then keeps nothing of it."""
        if request.id in self._accepted:
            raise NeverFits("id", "a request with this id is being served")
        check_fits(request, self.config.max_context_tokens, self._pool)
        self._waiting.check_room(now_s)
        accepted = Accepted(request=request, arrival=next(self._arrivals), added_s=now_s)
        self._accepted[request.id] = accepted
        self._waiting.append(accepted)

    def cancel(self, request_id: bytes) -> bool:
        """End a request without a word; says whether it was there. What is in flight for it is dropped on arrival."""
        accepted = self._accepted.pop(request_id, None)
        if accepted is None:
            return False
        self._waiting.remove(accepted)
        for stay in self._residents:
            if stay.sequence.accepted is accepted:
                self._leave(stay, Phase.ENDED)
        return True

    def expire(self, now_s: float) -> list[tuple[bytes, QueueTimeout]]:
        """End the requests that waited too long for their first admission; one that once ran never expires."""
        expired = self._waiting.expire(now_s)
        for request_id, _ in expired:
            del self._accepted[request_id]
        return expired

    # ---- steps are launched

    def schedule(self) -> Plan | None:
        """The next step, from now on counted as launched; None when nothing can run before a step completes."""
        if not self._outbox:
            self._decide()
        if not self._outbox:
            return None
        step = self._outbox.popleft()
        self._totals.count_launch(step.plan)
        self._in_flight.append(step)
        return step.plan

    def _decide(self) -> None:
        """Prefill and decode take turns while both have work."""
        ready = self._ready_to_decode()
        is_decode_turn = bool(ready) and self._is_decode_next
        if is_decode_turn or not self._launch_prefill():
            self._launch_decode(ready)

    def _ready_to_decode(self) -> list[Stay]:
        """Those with a block for their next token, oldest first; makes room by preemption."""
        starved: set[int] = set()  # partitions where an older one already waits: no need to look again
        ready = []
        for stay in self._residents:
            if not stay.can_decode:
                continue
            partition = stay.slot.partition
            if self._residents.grow(stay) or (partition not in starved and self._make_room(stay)):
                ready.append(stay)
            else:
                starved.add(partition)
        return ready

    def _make_room(self, stay: Stay) -> bool:
        """A block for the next token. False: blocks are about to come back, or this was the youngest and gave way."""
        partition = stay.slot.partition
        while not self._residents.grow(stay):
            if self._residents.is_draining(partition):
                return False
            youngest = self._residents.youngest_running(partition)
            self._totals.num_preemptions += 1
            self._leave(youngest, Phase.PREEMPTED)
            if youngest is stay:
                return False
        return True

    def _launch_decode(self, ready: list[Stay]) -> None:
        if not ready:
            return
        rows = tuple(stay.row() for stay in ready)
        for stay in ready:
            stay.num_computed += 1
            stay.num_pending += 1
        self._push(DecodePlan(number=next(self._numbers), rows=rows), ready, drawing=ready)
        self._is_decode_next = False

    def _launch_prefill(self) -> bool:
        """Fill one step's budget: the unfinished prefill first, then whoever can be admitted."""
        chunks: list[PrefillChunk] = []
        stays: list[Stay] = []
        drawing: list[Stay] = []
        forks: list[tuple[Stay, Stay]] = []
        budget = self.config.chunk_tokens
        while budget > 0 and len(chunks) < self.config.max_prefill_sequences:
            stay = self._prefilling or self._admit()
            if stay is None:
                break
            end = min(stay.sequence.num_tokens, stay.num_computed + budget)
            is_last = end == stay.sequence.num_tokens
            followers = self._fork(stay) if is_last else []
            samplers = [stay, *followers] if is_last else []
            chunks.append(stay.chunk(end, samplers))
            budget -= self._padded(end - stay.num_computed)
            self._prefilling = None if is_last else stay
            stay.num_computed = end
            stays += [stay, *followers]
            drawing += samplers
            forks += [(stay, follower) for follower in followers]
        if not chunks:
            return False
        self._push(PrefillPlan(number=next(self._numbers), chunks=tuple(chunks)), stays, drawing)
        for stay in drawing:
            stay.phase, stay.num_computed, stay.num_pending = Phase.DECODE, stay.sequence.num_tokens, 1
        self._launch_copies(forks)
        self._is_decode_next = True
        return True

    def _admit(self) -> Stay | None:
        """The head of the line, where a slot and blocks for its tokens and one more are free. Nobody overtakes it."""
        head, partition = self._waiting.head(), self._residents.roomiest()
        if head is None or partition is None:
            return None
        stay = self._enter(head, partition, self._pool.num_blocks_for(head.num_tokens + 1))
        if stay is not None:
            self._waiting.pop()
        return stay

    def _fork(self, leader: Stay) -> list[Stay]:
        """Let the choices that wait for this prefill join it; those without room prefill by themselves."""
        accepted = leader.sequence.accepted
        waiting, accepted.to_fork = accepted.to_fork, []
        num_prompt = len(accepted.request.prompt)
        shared = leader.blocks[: num_prompt // self._pool.block_size]
        followers = []
        for sequence in waiting:
            stay = self._enter(sequence, leader.slot.partition, self._pool.num_blocks_for(num_prompt), shared)
            if stay is None:
                self._waiting.come_back(sequence)
            else:
                followers.append(stay)
        return followers

    def _enter(self, sequence: Sequence, partition: int, num_blocks: int, shared: tuple[int, ...] = ()) -> Stay | None:
        stay = self._residents.enter(sequence, partition, num_blocks, shared)
        if stay is not None and needs_slot_state(sequence.request):
            self._push(stay.load(next(self._numbers)), [stay])
        return stay

    def _launch_copies(self, forks: list[tuple[Stay, Stay]]) -> None:
        """Full blocks are shared; a partly filled last one is copied for each follower, who writes into it next."""
        tails = [
            (leader, follower)
            for leader, follower in forks
            if len(leader.sequence.request.prompt) % self._pool.block_size
        ]
        if tails:
            pairs = tuple(
                (leader.slot.partition, leader.blocks[len(follower.blocks) - 1], follower.blocks[-1])
                for leader, follower in tails
            )
            stays = dict.fromkeys(stay for tail in tails for stay in tail)
            self._push(CopyPlan(number=next(self._numbers), pairs=pairs), list(stays))

    def _padded(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.q_tile) * self.config.q_tile

    def _push(self, plan: Plan, stays: list[Stay], drawing: list[Stay] | None = None) -> None:
        for stay in stays:
            stay.num_in_flight += 1
        self._outbox.append(_Step(plan=plan, stays=tuple(stays), drawing=tuple(drawing or ())))

    # ---- steps complete

    def complete(self, number: int, results: Results) -> Delivered:
        """Take the results of the oldest step in flight, one for each sequence it drew a token for.

        Raises ValueError for any other step: completing out of order would release what a step still uses.
        """
        if not self._in_flight or self._in_flight[0].plan.number != number:
            raise ValueError(f"step {number} is not the oldest in flight")
        step = self._in_flight.popleft()
        outputs = [
            output for stay in step.drawing if (output := self._deliver(stay, results[stay.sequence.id])) is not None
        ]
        for stay in step.stays:
            stay.num_in_flight -= 1
            self._settle(stay)
        finished = dict.fromkeys(output.sequence.request_id for output in outputs if output.finish)
        ended = tuple(request_id for request_id in finished if request_id not in self._accepted)
        return Delivered(outputs=tuple(outputs), ended=ended)

    def _deliver(self, stay: Stay, sampled: Sampled) -> Output | None:
        """Hand on one token; None where the sequence has ended since it was drawn."""
        stay.num_pending -= 1
        if stay.phase is Phase.ENDED:
            self._totals.wasted_tokens += 1
            return None
        finish = stay.sequence.append(sampled.token)
        if finish is not None:
            self._finish(stay)
        logprobs = () if sampled.logprobs is None else (sampled.logprobs,)
        return Output(sequence=stay.sequence.id, token_ids=(sampled.token,), logprobs=logprobs, finish=finish)

    def _finish(self, stay: Stay) -> None:
        accepted = stay.sequence.accepted
        accepted.num_live -= 1
        if accepted.num_live == 0:
            del self._accepted[accepted.request.id]
        self._leave(stay, Phase.ENDED)

    def _leave(self, stay: Stay, phase: Phase) -> None:
        """Schedule nothing more for this stay, and release what it holds once nothing in flight uses it."""
        stay.phase = phase
        if self._prefilling is stay:
            self._prefilling = None
        self._settle(stay)

    def _settle(self, stay: Stay) -> None:
        if stay.is_running or stay.num_in_flight:
            return
        self._residents.leave(stay)
        if stay.phase is Phase.PREEMPTED:
            self._waiting.come_back(stay.sequence)

    # ---- what others may know

    @property
    def is_idle(self) -> bool:
        """Nothing accepted and nothing in flight: every block and slot is free."""
        return not (self._accepted or self._outbox or self._in_flight)

    @property
    def num_in_flight(self) -> int:
        """Steps handed out and not completed."""
        return len(self._in_flight)

    def counts(self, partition: int) -> PartitionCounts:
        return self._pool.counts(partition)

    def num_free_slots(self, partition: int) -> int:
        return self._residents.num_free_slots(partition)

    def counters(self) -> Counters:
        """A snapshot; costs O(accepted requests)."""
        running = [stay for stay in self._residents if stay.is_running]
        num_live = sum(accepted.num_live for accepted in self._accepted.values())
        unfinished = self._prefilling.sequence.num_tokens - self._prefilling.num_computed if self._prefilling else 0
        return Counters(
            totals=replace(self._totals),
            num_running=len(running),
            num_waiting=num_live - len(running),
            queued_tokens=unfinished + self._waiting.num_tokens,
            active_tokens=sum(stay.sequence.num_tokens + stay.num_pending for stay in running),
        )
