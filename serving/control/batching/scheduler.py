"""Which step runs next: continuous batching with chunked prefill, preemption and forks, as a pure state machine.

It has no device and no clock (the time is an argument), so that a test or a simulator runs the very object that serves.
Four verbs drive it: `add` accepts a request, `join` one that was prefilled elsewhere, `schedule` decides a step and
counts it as launched, `complete` takes a step's results, in launch order. Steps may be launched before the results of
earlier ones are known; the device feeds each drawn token to the next step itself. Everything follows from four rules:

- The most important first, and of these the oldest, within a partition. Growth preempts the last in this order, be it
  running or only holding blocks, and the first is never preempted: something always finishes. A request that comes
  takes no slot from one that runs, however important it is. Who waits for a slot is overtaken only beside a prefill
  that a step cannot finish, by those that fit whole into a share of that step and are no less important, and neither of
  its own slot nor of its blocks.
- Growth before admission. Running sequences take the blocks they need next before anyone enters, so that a preempted
  sequence cannot take back at once what it had to give.
- In each partition one prefill at a time is unfinished: at most one sequence is cut by the end of a step's budget.
- What a launched step uses stays held until that step has completed, whatever happened meanwhile.

Where a sequence has a drafter, a row of a decode step may guess at tokens, and emits from one to `q_len` of them: only
the result tells where the sequence's next row begins, and what its drafter makes of it. So the rows of a microbatch
wait for its last step's result where one of them guesses, and more than one microbatch lets steps overlap all the same.
A drafter that sees no use in guessing lets its sequence go ahead as one without. Blocks are taken for all the positions
that a row may write, but nobody is preempted for a guess: a row that finds no block has fewer positions. Behind the
result the position goes back to what was emitted; blocks stay, to be written again.

Blocks that others hold, leased to handoffs in progress, are only fewer to grow into: where they alone are in the way,
`schedule` has nothing to run until they come back. Sampling is `models.sampling`'s; stop strings are found by the
gateway, and routing is `control.routing`'s.
Sources: Orca (OSDI 2022), PagedAttention (arXiv:2309.06180), Sarathi-Serve (arXiv:2403.02310); that short prompts pass
long ones, vLLM's partial prefills (pull request 10235); drafts, speculative decoding (arXiv:2211.17192) and EAGLE-3
(arXiv:2503.01840). vLLM (pull request 24799) and SGLang (pull request 11398) launch ahead of a draft's result too: they
keep the true lengths on the device and let the host count too many until it hears of them.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from moonshard.kv.blocks import BlockPool, PartitionCounts
from moonshard.kv.prefix import PrefixCache
from moonshard.serving.control.batching.admission import Bring
from moonshard.serving.control.batching.counters import Counters, Totals
from moonshard.serving.control.batching.landed import LandedRequest
from moonshard.serving.control.batching.launches import Draw, Launches
from moonshard.serving.control.batching.partition import Partition, PartitionConfig
from moonshard.serving.control.batching.queue import NeverFits, QueueFull, QueueTimeout, check_fits, check_resumed
from moonshard.serving.control.batching.sequence import Accepted, Occupancy, Phase, active_tokens, finish_reason
from moonshard.serving.control.drafting.drafter import CanVerify, Drafter, Drafters, Weigh
from moonshard.serving.control.fifo import is_full
from moonshard.serving.control.plan import DecodePlan, DecodeRow, Delivered, Plan, PrefillPlan, Results, Sampled
from moonshard.serving.control.request import Output, Request


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig(PartitionConfig):
    """The sizes of each partition; of the whole worker the longest context, the queue and the microbatches.

    An equal share of the queue is kept for each partition, however long the others' queues are.
    """

    max_context_tokens: int
    max_queued_requests: int
    has_prefix_cache: bool = True
    has_next_token_kv: bool = False  # a token has KV that depends on the token behind it, as a draft model's does
    num_processes: int = 1  # that have tiers below the pages, each for its part of the partitions
    num_microbatches: int = 1  # parts of the slots that decode in turn, so that the stages of a pipeline all have work

    def __post_init__(self) -> None:
        PartitionConfig.__post_init__(self)  # super() without arguments does not find its class in one with slots
        if self.max_queued_requests < 1:
            raise ValueError("the queue holds at least 1 request")
        if not 1 <= self.num_microbatches <= self.slots_per_partition:
            raise ValueError("there is at least 1 microbatch, and at least 1 slot in each")


class Scheduler:
    """Decides the steps of one worker, of any role: a prompt that was prefilled elsewhere comes in by `join`."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        drafters: Drafters | None = None,
        *,
        weigh: Weigh | None = None,
        can_verify: CanVerify = lambda num_rows: True,
    ):
        """`drafters` makes the drafter of a choice, or None where nothing guesses its tokens. For `q_len` of 1 none."""
        self.config = config
        self._drafters = drafters if config.q_len > 1 else None
        self._weigh = weigh
        self._can_verify = can_verify
        self._pool = pool
        self._accepted: dict[bytes, Accepted] = {}
        self._launches = Launches()
        self._totals = Totals()
        self.cache = PrefixCache(
            pool,
            is_on=config.has_prefix_cache,
            has_next_token_kv=config.has_next_token_kv,
            num_processes=config.num_processes,
        )
        self._partitions = tuple(
            Partition(config, pool, self.cache, partition, self._launches, self._totals)
            for partition in range(pool.num_partitions)
        )
        self._is_decode_next = False
        self._microbatch = 0  # the one that decoded last
        self._arrivals = itertools.count()

    def bring_with(self, bring: Bring) -> None:
        """From now on `bring` is asked of each request that could be admitted.

        Where it says that blocks of it are being brought, the request keeps its place, and is not admitted before
        `take_back`.
        """
        for partition in self._partitions:
            partition.admission.bring = bring

    def take_back(self, partition: int, request_id: bytes) -> None:
        """What was brought of it is here, or will not be. The request need not be here any more."""
        self._partitions[partition].waiting.take_back(request_id)

    # ---- requests come and go

    def check(self, request: Request, partition: int | None = None) -> None:
        """Raises NeverFits where `add` or `join` would refuse the request, however much room there is."""
        if partition is not None and not 0 <= partition < len(self._partitions):
            raise NeverFits("partition", f"there is no partition {partition} of {len(self._partitions)}")
        if request.id in self._accepted:
            raise NeverFits("id", "a request with this id is being served")
        check_fits(request, self.config.max_context_tokens, self._pool)

    def add(
        self,
        request: Request,
        now_s: float,
        resumed: Mapping[int, tuple[int, ...]] | None = None,
        partition: int | None = None,
    ) -> None:
        """Accept a request. Raises NeverFits or QueueFull, and then keeps nothing of it.

        `partition` is where it will live; None: where the fewest tokens are, queued or held, the lowest of equals.
        `resumed` are the tokens that each choice has that did not end elsewhere, none of them its last. Only these
        choices live here. They wait as those who come back do: no queue is too full for them, and they never expire.
        """
        self.check(request, partition)
        home = self._emptiest() if partition is None else self._partitions[partition]
        if resumed is None:
            self._check_room(home, now_s)
            accepted = self._accept(request, dict.fromkeys(range(request.n), ()))
            accepted.num_known_tokens = home.admission.num_known_tokens(accepted.leader)
            home.waiting.append(accepted, now_s)
            return
        check_resumed(request, resumed)
        for sequence in self._accept(request, resumed, is_resumed=True).choices:
            home.waiting.come_back(sequence)

    def _emptiest(self) -> Partition:
        return min(self._partitions, key=lambda partition: partition.queued_tokens + partition.active_tokens)

    def _check_room(self, partition: Partition, now_s: float) -> None:
        """Raises QueueFull. The head's wait so far is the best guess at how long a place in this queue takes."""
        num_queued = [each.waiting.num_queued for each in self._partitions]
        if is_full(num_queued, self._partitions.index(partition), self.config.max_queued_requests):
            raise QueueFull(retry_after_s=max(1.0, partition.waiting.head_wait_s(now_s)))

    def join(
        self,
        request: Request,
        partition: int,
        block_table: tuple[int, ...],
        tokens: tuple[int, ...],
        guesses: tuple[tuple[int, ...], ...] = (),
    ) -> bool:
        """Accept a request whose prompt's KV is in used blocks, one reference each, which pass over to the scheduler.

        `tokens` are the first of each choice, drawn elsewhere; a choice that ends with its first gives no output.
        `guesses`: what may follow each of them, or none at all.
        False: all ended, the blocks are released and nothing is kept. Raises NeverFits, and then takes nothing.
        """
        self.check(request, partition)
        if len(tokens) != request.n:
            raise NeverFits("tokens", f"{len(tokens)} first tokens came for {request.n} choices")
        parents = (None, *request.block_names)
        for block, name, parent in zip(block_table, request.block_names, parents, strict=False):
            self.cache.note(partition, block, name, parent)  # also of one that never gets a slot
        going_on = {choice: (token,) for choice, token in enumerate(tokens) if finish_reason(request, token, 1) is None}
        if not going_on:
            self._pool.release(partition, block_table[::-1])
            return False
        accepted = self._accept(request, going_on)
        for sequence in accepted.choices if guesses else ():
            if sequence.drafter is not None and guesses[sequence.id.choice]:
                sequence.drafter.take_guesses(1, guesses[sequence.id.choice])
        leader = accepted.leader
        self._partitions[partition].landed.append(LandedRequest(leader=leader, blocks=block_table))
        return True

    def _accept(
        self, request: Request, generated: Mapping[int, tuple[int, ...]], *, is_resumed: bool = False
    ) -> Accepted:
        arrival = next(self._arrivals)
        accepted = Accepted(request=request, arrival=arrival, is_resumed=is_resumed, generated=generated)
        if self._drafters is not None:
            for sequence in accepted.choices:
                sequence.drafter = self._drafters(request, sequence.id.choice)
        self._accepted[request.id] = accepted
        return accepted

    def serves(self, request_id: bytes) -> bool:
        """Whether a request of this id waits or runs."""
        return request_id in self._accepted

    def cancel(self, request_id: bytes) -> bool:
        """End a request without output for it; says whether it was there. What is in flight for it is dropped on
        arrival.
        """
        accepted = self._accepted.pop(request_id, None)
        if accepted is None:
            return False
        for partition in self._partitions:
            partition.remove(accepted)
        return True

    def expire(self, now_s: float) -> list[tuple[bytes, QueueTimeout]]:
        """End the requests that waited too long for their first admission; one that once ran never expires."""
        expired = [late for partition in self._partitions for late in partition.waiting.expire(now_s)]
        for request_id, _ in expired:
            del self._accepted[request_id]
        return expired

    def emptiest(self) -> int:
        """The partition that `add` would choose now."""
        return self._partitions.index(self._emptiest())

    # ---- steps are launched

    @property
    def has_unlaunched(self) -> bool:
        """Whether a decided step has not been handed out: the cache may know blocks that it will write."""
        return self._launches.has_decided

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
        for partition in self._partitions:
            partition.admission.admit_landed()
        can_guess = self._weigh_guesses()
        ready = [occupancy for partition in self._partitions for occupancy in partition.ready_to_decode()]
        is_decode_turn = bool(ready) and self._is_decode_next
        if is_decode_turn or not self._launch_prefill():
            self._launch_decode(ready, can_guess=can_guess)

    def _weigh_guesses(self) -> bool:
        """Whether as many rows as may be ready can be verified; with that, has it weighed whether they guess."""
        if not self._has_drafters:
            return False
        decoding = [[each for each in partition.slots if each.phase is Phase.DECODE] for partition in self._partitions]
        num_rows = max(map(len, decoding))
        can_verify = num_rows > 0 and self._can_verify(num_rows)
        if num_rows and self._weigh is not None:
            self._weigh([each.num_right for rows in decoding for each in rows], can_verify)
        return can_verify

    @property
    def _has_drafters(self) -> bool:
        return self._drafters is not None

    def _launch_decode(self, ready: list[Occupancy], *, can_guess: bool) -> None:
        ready = self._next_microbatch(ready)
        if not ready:
            return
        draws, rows, num_ahead, is_guessing = list[Draw](), list[DecodeRow](), 0, False
        for occupancy in ready:
            draft = self._partition_of(occupancy).draft(occupancy) if can_guess else ()
            most = 1 + len(draft)
            if can_guess:
                num_ahead, is_guessing = max(num_ahead, occupancy.num_ahead), is_guessing or occupancy.is_eager
            draws.append(Draw(occupancy, 1, most))
            rows.append(occupancy.row(most, draft))
            occupancy.num_computed += most
        plan = DecodePlan(
            number=self._launches.next_number(), rows=tuple(rows), num_ahead=num_ahead, is_guessing=is_guessing
        )
        self._launches.push(plan, ready, draws)
        self._is_decode_next = False

    def _next_microbatch(self, ready: list[Occupancy]) -> list[Occupancy]:
        """The rows of the next microbatch that has any; its step runs in the stages that the step before has left.

        A microbatch with rows whose result is awaited is passed over, so that these stay together with its rows that
        are ready.
        """
        count, awaited = self.config.num_microbatches, self._awaited_microbatches()
        for number in range(self._microbatch + 1, self._microbatch + 1 + count):
            microbatch = number % count
            found = [occupancy for occupancy in ready if occupancy.slot.index % count == microbatch]
            if found and microbatch not in awaited:
                self._microbatch = microbatch
                return found
        return []

    def _awaited_microbatches(self) -> set[int]:
        """The microbatches with rows whose next position only the result of a launched step tells."""
        if not self._has_drafters:
            return set()
        occupancies = [occupancy for partition in self._partitions for occupancy in partition.slots]
        return {each.slot.index % self.config.num_microbatches for each in occupancies if each.is_awaited}

    def _launch_prefill(self) -> bool:
        parts = [partition.fill_prefill() for partition in self._partitions]
        chunks = tuple(chunk for part in parts for chunk in part.chunks)
        if not chunks:
            return False
        drawing = [occupancy for part in parts for occupancy in part.drawing]
        plan = PrefillPlan(number=self._launches.next_number(), chunks=chunks)
        occupancies = [occupancy for part in parts for occupancy in part.occupancies]
        self._launches.push(plan, occupancies, [Draw(occupancy) for occupancy in drawing])
        for occupancy in drawing:
            occupancy.phase, occupancy.num_computed = Phase.DECODE, occupancy.sequence.num_tokens
        for partition, part in zip(self._partitions, parts, strict=True):
            partition.admission.copy_tails(part.forks)
        self._is_decode_next = True
        return True

    # ---- steps complete

    def complete(self, number: int, results: Results) -> Delivered:
        """Take the results of the oldest step in flight, one for each sequence it drew for.

        Raises ValueError for any other step, since completing out of order would release what a step still uses, and
        for fewer or more tokens than the step's plan allows.
        """
        launch = self._launches.complete(number)
        for partition, block in launch.borrowed:
            self._pool.release(partition, (block,))
        outputs = [
            output
            for draw in launch.draws
            if (output := self._deliver(draw, results[draw.occupancy.sequence.id])) is not None
        ]
        for occupancy in launch.occupancies:
            occupancy.num_in_flight -= 1
            self._partition_of(occupancy).settle(occupancy)
        finished = dict.fromkeys(output.sequence.request_id for output in outputs if output.finish)
        ended = tuple(request_id for request_id in finished if request_id not in self._accepted)
        return Delivered(outputs=tuple(outputs), ended=ended)

    def _tell(self, drafter: Drafter, generated: list[int], guesses: tuple[int, ...]) -> None:
        if guesses:
            drafter.take_guesses(len(generated), guesses)
        if not drafter.is_eager:
            drafter.watch(generated, self.config.q_len - 1)

    def _deliver(self, draw: Draw, sampled: Sampled) -> Output | None:
        """Hand on the tokens up to the one that ends the sequence; None where there are none, or it has ended since."""
        (occupancy, least, most), num_tokens = draw, len(sampled.tokens)
        if not least <= num_tokens <= most:
            raise ValueError(f"{num_tokens} tokens of a draw that gives {least} to {most}")
        occupancy.num_pending -= most
        occupancy.num_unsure -= most - least
        occupancy.num_computed -= most - num_tokens  # the next row begins behind what was emitted
        if occupancy.phase is Phase.ENDED:
            self._totals.wasted_tokens += num_tokens
            return None
        sequence = occupancy.sequence
        if most > 1 and sequence.drafter is not None:
            self._totals.count_guesses(most - 1, num_tokens - 1)
            sequence.drafter.note(most - 1, num_tokens - 1)
        is_first = not sequence.generated
        num_taken, finish = sequence.append(sampled.tokens)
        if sequence.drafter is not None:
            self._tell(sequence.drafter, sequence.generated, sampled.guesses)
        self._totals.wasted_tokens += num_tokens - num_taken
        self._partition_of(occupancy).slots.note(occupancy)
        if finish is not None:
            self._finish(occupancy)
        if not num_taken:
            return None
        is_whole = num_taken == num_tokens
        return Output(
            sequence.id,
            sampled.tokens if is_whole else sampled.tokens[:num_taken],
            sampled.logprobs if is_whole else sampled.logprobs[:num_taken],
            finish,
            (sequence.num_cached_tokens or 0) if is_first else 0,
            guesses=sampled.guesses if is_first else (),
        )

    def _finish(self, occupancy: Occupancy) -> None:
        accepted = occupancy.sequence.accepted
        accepted.num_live -= 1
        if accepted.num_live == 0:
            del self._accepted[accepted.request.id]
        self._partition_of(occupancy).leave(occupancy, Phase.ENDED)

    def _partition_of(self, occupancy: Occupancy) -> Partition:
        return self._partitions[occupancy.slot.partition]

    # ---- what others may know

    @property
    def is_idle(self) -> bool:
        """Nothing accepted and nothing in flight: every slot is free, and every block that was taken here."""
        return not (self._accepted or self._launches.has_decided or self._launches.num_in_flight)

    def counts(self, partition: int) -> PartitionCounts:
        return self._pool.counts(partition)

    def num_free_slots(self, partition: int) -> int:
        return self._partitions[partition].slots.num_free_slots

    def num_spare_slots(self, partition: int) -> int:
        """Free slots of the partition, less one for each landed sequence there; negative where those are more."""
        return self._partitions[partition].num_spare_slots

    def landed_tokens(self, partition: int) -> int:
        """How many tokens the landed requests of the partition have, which wait for a slot."""
        return self._partitions[partition].landed_tokens

    def num_blocks_to_grow(self, partition: int) -> int:
        """How many blocks the sequences take that run or have landed there, if each goes on by one column."""
        return self._partitions[partition].num_blocks_to_grow

    def num_blocks_due(self, partition: int) -> int:
        """What the next in the queue there needs: whoever takes blocks from outside should leave as many."""
        return self._partitions[partition].admission.num_blocks_due

    def counters(self) -> Counters:
        """A snapshot; costs O(accepted requests)."""
        num_live = sum([accepted.num_live for accepted in self._accepted.values()])
        running = [partition.slots.running() for partition in self._partitions]
        num_running = sum(map(len, running))
        return Counters(
            totals=self._totals.snapshot(),
            num_running=num_running,
            num_waiting=num_live - num_running,
            queued_tokens=tuple([partition.queued_tokens for partition in self._partitions]),
            active_tokens=tuple(map(active_tokens, running)),
        )
