"""A scheduler with its fake device and its clients: launches, delays and completes steps, and checks what must hold."""

import itertools
import random
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from moonshard.kv.blocks import BlockGroup, BlockGroups, BlockPool
from moonshard.kv.prefix import block_names
from moonshard.serving.control.batching.scheduler import Scheduler, SchedulerConfig
from moonshard.serving.control.batching.sequence import Occupancy, Phase, Sequence
from moonshard.serving.control.plan import CopyPlan, DecodePlan, DecodeRow, LoadPlan, Plan, PrefillPlan, Sampled
from moonshard.serving.control.request import FinishReason, Output, Request, SequenceId, SlotId
from moonshard.serving.control.sampling_parameters import Sampling
from tests.serving.control.batching.stepping import Guesser
from tests.serving.fake_device import FakeDevice, true_output

type Holders = dict[tuple[int, int], list[tuple[int, ...] | None]]  # by partition and block: known tokens up to its end
BORROWED = (-1,)  # held for a copy that is under way


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserved:
    """A handoff in progress: the blocks that begin its prompt are held, the others are still to be written."""

    request: Request
    partition: int
    held: tuple[int, ...]
    leased: tuple[int, ...]


class Bench:
    """One run of a scheduler. `check` must hold after every transition, `check_end` when all has ended."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool):
        self.config, self.pool = config, pool
        self.scheduler = Scheduler(config, pool, lambda request, choice: Guesser(), can_verify=self.can_verify)
        self.num_verifiable = 0  # rows of a partition that were last asked about
        self.device = FakeDevice(pool, self.num_emitted)
        self.emissions = random.Random(0)
        self.num_emissions: Counter[int] = Counter()  # rows of several positions, by the tokens they emitted
        self.in_flight: deque[tuple[Plan, Mapping[SequenceId, Sampled]]] = deque()
        self.requests: dict[bytes, Request] = {}
        self.outputs: dict[SequenceId, list[int]] = {}
        self.finished: dict[SequenceId, FinishReason] = {}
        self.ended: Counter[bytes] = Counter()  # by completion, cancel or expiry
        self.cut_short: set[bytes] = set()
        self.numbers = itertools.count()  # of requests, whether they are accepted or not
        self.reserved: dict[bytes, Reserved] = {}
        self.joined: set[bytes] = set()
        self.resumed: set[bytes] = set()
        self.homes: dict[bytes, int] = {}  # partition by request that was joined or prefilled
        self.num_held = 0  # blocks that were known when a handoff reserved
        self.num_joins_ahead = 0  # of handoffs that held blocks which a step was yet to write
        self.num_forks = 0
        self.num_join_loads = 0  # more than joined requests where choices were forked
        self.num_joined_prefills = 0  # of joined requests that gave way, or of choices without room
        self.num_waits_for_leases = 0
        self.num_wasted = 0  # tokens that were drawn for whoever had ended, or behind the one that ended it
        self.num_wasted_uncut = 0  # of these, for requests that nobody cut short
        self.num_behind_the_last = 0  # of these, that came together with the one that ended the sequence
        self.num_plans = 0
        self.now_s = 0.0

    def add(self, request: Request, partition: int | None = None) -> None:
        self.scheduler.add(request, self.now_s, partition=partition)
        self.requests[request.id] = request
        if partition is not None:
            self.homes[request.id] = partition

    def add_resumed(self, request: Request, num_generated: Mapping[int, int]) -> None:
        """Adds a request that was begun elsewhere: some choices have that many tokens, the others have ended."""
        for choice in range(request.n):
            tokens, reason = true_output(request, choice)
            id = SequenceId(request.id, choice)
            self.outputs[id] = tokens[: num_generated[choice]] if choice in num_generated else tokens
            if choice not in num_generated:
                self.finished[id] = reason
        resumed = {choice: tuple(self.outputs[SequenceId(request.id, choice)]) for choice in num_generated}
        self.scheduler.add(request, self.now_s, resumed)
        self.requests[request.id] = request
        self.resumed.add(request.id)

    def reserve(self, request: Request, partition: int) -> bool:
        """Takes blocks for the prompt, as the decode side of a handoff does."""
        self.scheduler.check(request)
        num_blocks = self.pool.num_blocks_for(len(request.prompt))
        names = block_names(request.prefix_root, request.prompt, self.pool.block_size)
        held = self.scheduler.cache.match(partition, names)
        self.pool.hold(partition, held)
        leased = self.pool.lease(partition, num_blocks - len(held))
        if leased is None:
            self.pool.release(partition, held[::-1])
            return False
        named = replace(request, block_names=tuple(names))
        self.reserved[request.id] = Reserved(request=named, partition=partition, held=held, leased=leased)
        self.num_held += len(held)
        return True

    def give_up(self, request_id: bytes) -> None:
        reserved = self.reserved.pop(request_id)
        self.pool.land(reserved.partition, reserved.leased)
        self.pool.release(reserved.partition, (*reserved.held, *reserved.leased)[::-1])

    def join(self, request_id: bytes) -> None:
        reserved = self.reserved.pop(request_id)
        request, partition = reserved.request, reserved.partition
        blocks = (*reserved.held, *reserved.leased)
        self.pool.land(partition, reserved.leased)
        due = self.due_blocks
        self.num_joins_ahead += any((partition, block) in due for block in reserved.held)
        self.device.land(request, partition, blocks, len(reserved.held), due)
        self.requests[request.id] = request
        self.joined.add(request.id)
        self.homes[request.id] = partition
        for choice in range(request.n):
            id, (right, reason) = SequenceId(request.id, choice), true_output(request, choice)
            self.outputs[id] = right[:1]
            if len(right) == 1:
                self.finished[id] = reason
        tokens = tuple(self.outputs[SequenceId(request.id, choice)][0] for choice in range(request.n))
        goes_on = self.scheduler.join(request, partition, blocks, tokens)
        assert goes_on == any(SequenceId(request.id, choice) not in self.finished for choice in range(request.n))
        self.ended[request.id] += not goes_on

    def cancel(self, request_id: bytes) -> None:
        was_live = self.scheduler.cancel(request_id)
        assert was_live == (not self.ended[request_id])
        if was_live:
            self.cut(request_id)
        assert not self.scheduler.cancel(request_id)

    def expire(self) -> None:
        for request_id, _ in self.scheduler.expire(self.now_s):
            assert not any(id.request_id == request_id for id in self.outputs)
            self.cut(request_id)

    def cut(self, request_id: bytes) -> None:
        self.ended[request_id] += 1
        self.cut_short.add(request_id)

    def launch(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is None:
            assert self.in_flight or not self.live or self.reserved, "nothing runs, and nothing will"
            self.num_waits_for_leases += not self.in_flight and bool(self.live)
            return False
        assert plan.number == self.num_plans
        self.num_plans += 1
        self.check_plan(plan)
        self.in_flight.append((plan, self.device.run(plan)))
        return True

    def can_verify(self, num_rows: int) -> bool:
        self.num_verifiable = num_rows
        return True

    def num_emitted(self, row: DecodeRow) -> int:
        """A random number that the row allows: exactly one where it does not guess."""
        num_emitted = self.emissions.randint(1, row.q_len)
        self.num_emissions[num_emitted] += row.q_len > 1
        return num_emitted

    def check_plan(self, plan: Plan) -> None:
        slots = [slot for _, slot in used_slots(plan)]
        assert len(slots) == len(set(slots))
        if isinstance(plan, PrefillPlan):
            tile = self.config.q_tile
            for partition in range(self.pool.num_partitions):
                lengths = [len(chunk.tokens) for chunk in plan.chunks if chunk.slot.partition == partition]
                assert sum(-(-length // tile) * tile for length in lengths) <= self.config.chunk_tokens
                assert len(lengths) <= self.config.max_prefill_sequences
            assert all(chunk.tokens for chunk in plan.chunks)
            for chunk in plan.chunks:
                assert self.homes.setdefault(chunk.sequence.request_id, chunk.slot.partition) == chunk.slot.partition
            self.num_forks += sum(max(0, len(chunk.samples) - 1) for chunk in plan.chunks)
            self.num_joined_prefills += sum(chunk.sequence.request_id in self.joined for chunk in plan.chunks)
        elif isinstance(plan, DecodePlan):
            self.check_rows(plan)
        elif isinstance(plan, LoadPlan):
            self.num_join_loads += plan.sequence.request_id in self.joined and len(plan.history) == plan.num_prompt + 1

    def check_rows(self, plan: DecodePlan) -> None:
        """A step is one microbatch; where rows guess, their last step is over, so that every position is known."""
        (microbatch,) = {row.slot.index % self.config.num_microbatches for row in plan.rows}
        assert all(1 <= row.q_len <= self.config.q_len for row in plan.rows)
        if self.config.q_len > 1:
            in_flight = [row for plan, _ in self.in_flight if isinstance(plan, DecodePlan) for row in plan.rows]
            assert microbatch not in {row.slot.index % self.config.num_microbatches for row in in_flight}
            assert not {row.sequence for row in plan.rows} & {row.sequence for row in in_flight}
            assert max(Counter(row.slot.partition for row in plan.rows).values()) <= self.num_verifiable

    def complete(self) -> None:
        plan, results = self.in_flight.popleft()
        delivered = self.scheduler.complete(plan.number, results)
        for output in delivered.outputs:
            self.take(output)
        self.count_wasted(results, {output.sequence: len(output.token_ids) for output in delivered.outputs})
        self.ended.update(delivered.ended)
        for request_id in delivered.ended:
            assert all(SequenceId(request_id, choice) in self.finished for choice in range(self.requests[request_id].n))

    def count_wasted(self, results: Mapping[SequenceId, Sampled], num_taken: Mapping[SequenceId, int]) -> None:
        """A token that is not delivered was drawn for a sequence that is over, and is counted."""
        for id, sampled in results.items():
            num_lost = len(sampled.tokens) - num_taken.get(id, 0)
            assert not num_lost or id in self.finished or id.request_id in self.cut_short
            self.num_wasted += num_lost
            self.num_wasted_uncut += num_lost if id.request_id not in self.cut_short else 0
            self.num_behind_the_last += num_lost if id in num_taken else 0
        assert self.scheduler.counters().totals.wasted_tokens == self.num_wasted

    def take(self, output: Output) -> None:
        id = output.sequence
        assert output.token_ids
        assert id not in self.finished
        assert not self.ended[id.request_id]
        tokens = self.outputs.setdefault(id, [])
        tokens += output.token_ids
        right, reason = true_output(self.requests[id.request_id], id.choice)
        assert tokens == right[: len(tokens)]
        assert output.finish == (reason if len(tokens) == len(right) else None)
        if output.finish:
            self.finished[id] = output.finish

    @property
    def live(self) -> list[bytes]:
        return [request_id for request_id in self.requests if not self.ended[request_id]]

    def drain(self, depth: int) -> None:
        for request_id in list(self.reserved):
            self.join(request_id)
            self.check()
        while not self.scheduler.is_idle:
            while len(self.in_flight) < depth and self.launch():
                self.check()
            if self.in_flight:
                self.complete()
            self.check()

    def check(self) -> None:
        """What holds after every transition."""
        occupancies = self.occupancies
        slots = [occupancy.slot for occupancy in occupancies]
        assert len(slots) == len(set(slots))
        landed = [
            (partition, landed_request)
            for partition, home in enumerate(self.scheduler._partitions)
            for landed_request in home.landed
        ]
        holders: Holders = {}
        for occupancy in occupancies:
            self.note_holder(holders, occupancy.slot.partition, occupancy.blocks, occupancy.sequence)
        for partition, landed_request in landed:
            self.note_holder(holders, partition, landed_request.blocks, landed_request.leader)
        for reserved in self.reserved.values():
            for index, block in enumerate(reserved.held):
                content = reserved.request.prompt[: (index + 1) * self.pool.block_size]
                holders.setdefault((reserved.partition, block), []).append(content)
        for launch in (*self.scheduler._launches._outbox, *self.scheduler._launches._in_flight):
            for place in launch.borrowed:
                holders.setdefault(place, []).append(BORROWED)
        for owners in holders.values():
            contents = {owner for owner in owners if owner is not BORROWED}
            assert len(contents) <= 1  # who shares a block has the same tokens up to its end
            assert len(owners) == 1 or None not in contents  # and all of them
        for partition in range(self.pool.num_partitions):
            cut = [
                occupancy
                for occupancy in occupancies
                if occupancy.phase is Phase.PREFILL and occupancy.slot.partition == partition
            ]
            assert len(cut) <= 1
        for partition, landed_request in landed:
            running = [
                occupancy for occupancy in occupancies if occupancy.is_running and occupancy.slot.partition == partition
            ]
            leader = landed_request.leader
            peers = [each.sequence for each in running if each.sequence.request.priority == leader.request.priority]
            assert all(sequence.order < leader.order for sequence in peers)
        self.check_conservation(holders, slots)
        self.check_what_is_in_flight()
        self.check_counters()

    def note_holder(self, holders: Holders, partition: int, blocks: tuple[int, ...], sequence: Sequence) -> None:
        groups, block_size = self.pool.groups, self.pool.block_size
        growing = [index for index, group in enumerate(groups.groups) if group.window is None]
        num_full = min(sequence.num_tokens // block_size, len(blocks))
        columns = {groups.place(group, column): column for group in growing for column in range(num_full)}
        for place, block in enumerate(blocks):
            content = sequence.tokens(0, (columns[place] + 1) * block_size) if place in columns else None
            holders.setdefault((partition, block), []).append(content)

    def check_conservation(self, holders: Holders, slots: list[SlotId]):
        for partition in range(self.pool.num_partitions):
            counts = self.scheduler.counts(partition)
            assert counts.total == self.pool.blocks_per_partition
            assert counts.used == sum(owner == partition for owner, _ in holders)
            leases = [len(reserved.leased) for reserved in self.reserved.values() if reserved.partition == partition]
            assert counts.leased == sum(leases)
            for block in range(self.pool.blocks_per_partition):
                assert self.pool.num_refs(partition, block) == len(holders.get((partition, block), ()))
            num_taken = sum(slot.partition == partition for slot in slots)
            assert self.scheduler.num_free_slots(partition) + num_taken == self.config.slots_per_partition

    def check_what_is_in_flight(self) -> None:
        """Slots and blocks of launched steps stay with the sequences that they were launched for."""
        owners = {occupancy.slot: occupancy for occupancy in self.occupancies}
        for plan, _ in self.in_flight:
            for id, slot in used_slots(plan):
                assert owners[slot].sequence.id == id
            for slot, block in used_blocks(plan):
                assert block in owners[slot].blocks
            for partition, *pair in plan.pairs if isinstance(plan, CopyPlan) else ():
                assert all(self.pool.num_refs(partition, block) > 0 for block in pair)

    def check_counters(self) -> None:
        counters = self.scheduler.counters()
        num_unfinished = sum(
            SequenceId(id, choice) not in self.finished for id in self.live for choice in range(self.requests[id].n)
        )
        assert counters.num_running + counters.num_waiting == num_unfinished

    @property
    def due_blocks(self) -> set[tuple[int, int]]:
        """(partition, block) written by steps that are decided and not handed out yet."""
        plans = [launch.plan for launch in self.scheduler._launches._outbox]
        return {(slot.partition, block) for plan in plans for slot, block in used_blocks(plan)}

    @property
    def occupancies(self) -> list[Occupancy]:
        return [occupancy for partition in self.scheduler._partitions for occupancy in partition.slots]

    def check_end(self) -> None:
        """Every request ended once, with the right tokens, and every pool is as it began."""
        assert self.scheduler.is_idle
        assert self.ended == dict.fromkeys(self.requests, 1)
        for request_id, request in self.requests.items():
            for choice in range(request.n) if request_id not in self.cut_short else ():
                id = SequenceId(request_id, choice)
                assert (self.outputs[id], self.finished[id]) == true_output(request, choice)
        for partition in range(self.pool.num_partitions):
            assert self.scheduler.counts(partition).free == self.pool.blocks_per_partition
            assert self.scheduler.num_free_slots(partition) == self.config.slots_per_partition
        assert self.scheduler.schedule() is None


def used_slots(plan: Plan) -> list[tuple[SequenceId, SlotId]]:
    match plan:
        case LoadPlan():
            return [(plan.sequence, plan.slot)]
        case PrefillPlan():
            return [pair for chunk in plan.chunks for pair in chunk.samples or [(chunk.sequence, chunk.slot)]]
        case DecodePlan():
            return [(row.sequence, row.slot) for row in plan.rows]
        case CopyPlan():
            return []


def used_blocks(plan: Plan) -> list[tuple[SlotId, int]]:
    items = plan.chunks if isinstance(plan, PrefillPlan) else plan.rows if isinstance(plan, DecodePlan) else ()
    return [(item.slot, block) for item in items for block in item.block_table]


def a_bench(
    num_partitions: int,
    num_blocks: int,
    *,
    slots: int = 3,
    block_size: int = 4,
    q_tile: int = 4,
    num_microbatches: int = 1,
    short_share: float = 0.5,
    q_len: int = 1,
    has_next_token_kv: bool = False,
    groups: tuple[BlockGroup, ...] = (BlockGroup(),),
) -> Bench:
    """With a group that has a window, sequences may be longer than all blocks of the pool."""
    pool = BlockPool(num_partitions, num_blocks, block_size, BlockGroups(groups))
    config = SchedulerConfig(
        slots_per_partition=slots,
        chunk_tokens=2 * block_size,
        short_share=short_share,
        q_tile=q_tile,
        max_prefill_sequences=3,
        num_microbatches=min(num_microbatches, slots),
        q_len=q_len,
        has_next_token_kv=has_next_token_kv,
        max_context_tokens=pool.num_tokens_in(num_blocks, 2 * num_blocks * block_size),
        max_queued_requests=1000,
        queue_timeout_s=30.0,
    )
    return Bench(config, pool)


def a_request(
    number: int,
    num_prompt: int,
    max_tokens: int,
    *,
    n: int = 1,
    num_stops: int = 0,
    min_tokens: int = 0,
    penalty=0.0,
    priority: int = 0,
) -> Request:
    return Request(
        id=number.to_bytes(16),
        prompt=tuple(100 + number % 3 + position for position in range(num_prompt)),  # a third of all begin alike
        sampling=Sampling(seed=number, presence_penalty=penalty),
        stop_token_ids=frozenset(range(num_stops)),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        n=n,
        priority=priority,
    )
