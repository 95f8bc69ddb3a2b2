"""Which step runs next: continuous batching with chunked prefill, preemption and forks, as a pure state machine.

Stands apart from the engine so that a laptop or a simulator runs the very object that serves. Four verbs drive it:
`add` accepts a request, `join` one that was prefilled elsewhere, `schedule` decides a step and counts it as launched,
`complete` takes a step's results, in launch order. Steps may be launched before the results of earlier ones are known;
the device feeds each drawn token to the next step itself. Everything follows from four rules:

- Oldest first. Who waits for a slot is not overtaken by anyone younger, growth preempts the youngest of the partition,
  be it running or only holding blocks, and the oldest of all is never preempted: something always finishes.
- Growth before admission. Running sequences take the blocks they need next before anyone enters, so that a preempted
  sequence cannot take back at once what it had to give.
- One prefill at a time is unfinished. A step's budget is spent in order, so at most one sequence is cut by its end.
- What a launched step uses stays held until that step has completed, whatever happened meanwhile.

Blocks that others hold, leased to handoffs in progress, are only fewer to grow into: where they alone are in the way,
`schedule` has nothing to run until they come back. Left out: token values, sampling, stop strings, routing, and the
clock, which is an argument.
Sources: Orca (OSDI 2022), PagedAttention (arXiv:2309.06180), Sarathi-Serve (arXiv:2403.02310).
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from moonshard.kv.blocks import BlockPool, PartitionCounts
from moonshard.serving.counters import Counters, Totals
from moonshard.serving.joiners import Joiner, Joiners
from moonshard.serving.launches import Launches
from moonshard.serving.plan import DecodePlan, Delivered, Plan, PrefillChunk, PrefillPlan, Results, Sampled
from moonshard.serving.request import Output, Request
from moonshard.serving.residents import Residents
from moonshard.serving.seating import Seating
from moonshard.serving.sequence import Accepted, Phase, Stay, finish_reason
from moonshard.serving.waiting import NeverFits, QueueTimeout, WaitingLine, check_fits, check_resumed


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


class Scheduler:
    """The step loop's decisions for one worker, whatever its part: what it need not prefill, it is given by `join`."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool):
        self.config = config
        self._pool = pool
        self._residents = Residents(pool, config.slots_per_partition)
        self._accepted: dict[bytes, Accepted] = {}
        self._waiting = WaitingLine(config.max_queued_requests, config.queue_timeout_s)
        self._joiners = Joiners(pool)
        self._launches = Launches()
        self._seating = Seating(pool, self._residents, self._waiting, self._joiners, self._launches)
        self._prefilling: Stay | None = None  # the one whose prefill the last budget cut
        self._is_decode_next = False
        self._arrivals = itertools.count()
        self._totals = Totals()

    # ---- requests come and go

    def check(self, request: Request) -> None:
        """Raises NeverFits where `add` or `join` would refuse the request, however much room there is."""
        if request.id in self._accepted:
            raise NeverFits("id", "a request with this id is being served")
        check_fits(request, self.config.max_context_tokens, self._pool)

    def add(self, request: Request, now_s: float, resumed: Mapping[int, tuple[int, ...]] | None = None) -> None:
        """Accept a request. Raises NeverFits or QueueFull, and then keeps nothing of it.

        `resumed` are the tokens that each choice has that did not end elsewhere, none of them its last. Only these
        choices live here. They wait as those who come back do: no queue is too full for them, and they never expire.
        """
        self.check(request)
        if resumed is None:
            self._waiting.check_room(now_s)
            accepted = self._accept(request, dict.fromkeys(range(request.n), ()))
            self._waiting.append(accepted, now_s)
            return
        check_resumed(request, resumed)
        for sequence in self._accept(request, resumed, is_resumed=True).choices:
            self._waiting.come_back(sequence)

    def join(self, request: Request, partition: int, block_table: tuple[int, ...], tokens: tuple[int, ...]) -> bool:
        """Accept a request whose prompt's KV is in used blocks, one reference each, which pass over to the scheduler.

        `tokens` are the first of each choice, drawn elsewhere; a choice that ends with its first gives no output.
        False: all ended, the blocks are released and nothing is kept. Raises NeverFits, and then takes nothing.
        """
        self.check(request)
        if len(tokens) != request.n:
            raise NeverFits("tokens", f"{len(tokens)} first tokens came for {request.n} choices")
        going_on = {choice: (token,) for choice, token in enumerate(tokens) if finish_reason(request, token, 1) is None}
        if not going_on:
            self._pool.release(partition, block_table[::-1])
            return False
        leader = self._accept(request, going_on).leader
        self._joiners.append(Joiner(leader=leader, partition=partition, blocks=block_table))
        return True

    def _accept(
        self, request: Request, generated: Mapping[int, tuple[int, ...]], *, is_resumed: bool = False
    ) -> Accepted:
        arrival = next(self._arrivals)
        accepted = Accepted(request=request, arrival=arrival, is_resumed=is_resumed, generated=generated)
        self._accepted[request.id] = accepted
        return accepted

    def cancel(self, request_id: bytes) -> bool:
        """End a request without a word; says whether it was there. What is in flight for it is dropped on arrival."""
        accepted = self._accepted.pop(request_id, None)
        if accepted is None:
            return False
        self._waiting.remove(accepted)
        self._joiners.remove(accepted)
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
        if not self._launches.has_decided:
            self._decide()
        plan = self._launches.hand_out()
        if plan is not None:
            self._totals.count_launch(plan)
        return plan

    def _decide(self) -> None:
        """Prefill and decode take turns while both have work."""
        self._seating.seat_joiners()
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
        while not self._residents.grow(stay):
            if self._residents.is_draining(stay.slot.partition) or not self._preempt_for(stay):
                return False
        return True

    def _preempt_for(self, stay: Stay) -> bool:
        """The youngest of the partition gives way: joiners arrived last. False where it is this one, or alone here."""
        running = self._residents.running(stay.slot.partition)
        joiners = self._joiners.of(stay.slot.partition)
        if running == [stay] and not joiners:
            return False  # leases hold the rest: to begin anew would only lose what it has
        self._totals.num_preemptions += 1
        if joiners:
            self._seating.send_back(joiners[-1])
        else:
            self._leave(running[-1], Phase.PREEMPTED)
        return stay.is_running

    def _launch_decode(self, ready: list[Stay]) -> None:
        if not ready:
            return
        rows = tuple(stay.row() for stay in ready)
        for stay in ready:
            stay.num_computed += 1
            stay.num_pending += 1
        self._launches.push(DecodePlan(number=self._launches.next_number(), rows=rows), ready, drawing=ready)
        self._is_decode_next = False

    def _launch_prefill(self) -> bool:
        """Fill one step's budget: the unfinished prefill first, then whoever can be admitted."""
        chunks: list[PrefillChunk] = []
        stays: list[Stay] = []
        drawing: list[Stay] = []
        forks: list[tuple[Stay, Stay]] = []
        budget = self.config.chunk_tokens
        while budget > 0 and len(chunks) < self.config.max_prefill_sequences:
            stay = self._prefilling or self._seating.admit()
            if stay is None:
                break
            end = min(stay.sequence.num_tokens, stay.num_computed + budget)
            is_last = end == stay.sequence.num_tokens
            followers = self._seating.fork(stay) if is_last else []
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
        plan = PrefillPlan(number=self._launches.next_number(), chunks=tuple(chunks))
        self._launches.push(plan, stays, drawing)
        for stay in drawing:
            stay.phase, stay.num_computed, stay.num_pending = Phase.DECODE, stay.sequence.num_tokens, 1
        self._seating.copy_tails(forks)
        self._is_decode_next = True
        return True

    def _padded(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.q_tile) * self.config.q_tile

    # ---- steps complete

    def complete(self, number: int, results: Results) -> Delivered:
        """Take the results of the oldest step in flight, one for each sequence it drew a token for.

        Raises ValueError for any other step: completing out of order would release what a step still uses.
        """
        launch = self._launches.complete(number)
        outputs = [
            output for stay in launch.drawing if (output := self._deliver(stay, results[stay.sequence.id])) is not None
        ]
        for stay in launch.stays:
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
        """Nothing accepted and nothing in flight: every slot is free, and every block that was taken here."""
        return not (self._accepted or self._launches.has_decided or self._launches.num_in_flight)

    def counts(self, partition: int) -> PartitionCounts:
        return self._pool.counts(partition)

    def num_free_slots(self, partition: int) -> int:
        return self._residents.num_free_slots(partition)

    def num_free_seats(self, partition: int) -> int:
        """The free slots that are left once all who have joined there sit; below 0 where they lack some."""
        num_joined = sum(joiner.num_sequences for joiner in self._joiners.of(partition))
        return self._residents.num_free_slots(partition) - num_joined

    def num_sequences(self, partition: int) -> int:
        """Those that may need another block of the partition: what runs there, and what has joined there."""
        num_joined = sum(joiner.num_sequences for joiner in self._joiners.of(partition))
        return len(self._residents.running(partition)) + num_joined

    @property
    def num_blocks_due(self) -> int:
        """What the next of those who wait here needs: whoever takes blocks from outside should leave as many."""
        return self._seating.num_blocks_due

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
