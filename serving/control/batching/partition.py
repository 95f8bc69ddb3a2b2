"""One partition of the scheduler: who waits for it, who lives in it, and what its part of the next step holds.

A request lives in one partition for life, so partitions have nothing in common but the steps: a step runs on all of
them at once, and each fills its own rows. A partition that is full stops nobody elsewhere. Whether the next step
prefills or decodes, and what its results mean for a request, is decided in `scheduler`.
"""

from dataclasses import dataclass, field

from moonshard.kv.blocks import BlockPool
from moonshard.kv.prefix import PrefixCache
from moonshard.serving.control.batching.admission import Admission
from moonshard.serving.control.batching.counters import Totals
from moonshard.serving.control.batching.landed import LandedRequests
from moonshard.serving.control.batching.launches import Launches
from moonshard.serving.control.batching.queue import WaitingLine
from moonshard.serving.control.batching.sequence import Accepted, Occupancy, Phase, active_tokens
from moonshard.serving.control.batching.slots import Slots
from moonshard.serving.control.plan import PrefillChunk


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionConfig:
    """`chunk_tokens` is a partition's budget of a prefill step, where a sequence's chunk counts padded to `q_tile`.

    Of what a sequence would be cut by, it leaves `short_share` to those that fit into that whole.
    """

    slots_per_partition: int
    chunk_tokens: int
    short_share: float = 0.5
    q_tile: int = 1
    max_prefill_sequences: int = 8
    q_len: int = 1  # positions that a row of a decode step computes, at most; more than 1 guesses at tokens
    queue_timeout_s: float

    def __post_init__(self) -> None:
        if min(self.slots_per_partition, self.q_tile, self.max_prefill_sequences, self.q_len) < 1:
            raise ValueError("slots, tile, sequences of a prefill step and positions of a decode row are at least 1")
        if self.chunk_tokens < 1 or self.chunk_tokens % self.q_tile:
            raise ValueError(f"chunk_tokens {self.chunk_tokens} is not a multiple of q_tile {self.q_tile}")
        if not 0 <= self.short_share < 1:
            raise ValueError(f"short_share {self.short_share} is not in [0, 1)")


@dataclass(eq=False, kw_only=True, slots=True)
class Prefills:
    """A partition's part of a prefill step."""

    chunks: list[PrefillChunk] = field(default_factory=list[PrefillChunk])
    occupancies: list[Occupancy] = field(default_factory=list[Occupancy])  # that the step uses
    drawing: list[Occupancy] = field(default_factory=list[Occupancy])
    forks: list[tuple[Occupancy, Occupancy]] = field(default_factory=list[tuple[Occupancy, Occupancy]])
    completed: set[int] = field(default_factory=set[int])  # blocks, by this very step


class Partition:
    """The waiting line, the landed requests and the occupancies of one partition, and the rules by which they meet."""

    def __init__(
        self,
        config: PartitionConfig,
        pool: BlockPool,
        cache: PrefixCache,
        partition: int,
        launches: Launches,
        totals: Totals,
    ):
        self.slots = Slots(pool, cache, partition, config.slots_per_partition)
        self.waiting = WaitingLine(config.queue_timeout_s)
        self.landed = LandedRequests(pool, partition)
        self.admission = Admission(pool, cache, self.slots, self.waiting, self.landed, launches, totals)
        self._config = config
        self._totals = totals
        self._prefilling: Occupancy | None = None  # the one whose prefill the last budget cut

    # ---- what a step holds

    def ready_to_decode(self) -> list[Occupancy]:
        """The occupancies that have a block for their next token, in their order. Makes room for the first by
        preempting the last.

        An occupancy that waits for a result first takes the free block that it may need behind that result, before
        anyone enters.
        """
        is_starved = False  # one before it already waits: no need to look again
        ready = list[Occupancy]()
        for occupancy in self.slots:
            if not occupancy.can_decode:
                if occupancy.may_go_on:
                    self.slots.grow(occupancy)
                continue
            if self.slots.grow(occupancy) or (not is_starved and self._make_room(occupancy)):
                ready.append(occupancy)
            else:
                is_starved = True
        if self.landed.has_any:  # who gave way to one may have left its slot
            self.admission.admit_landed()
        return ready

    def draft(self, occupancy: Occupancy) -> tuple[int, ...]:
        """The guesses of a ready occupancy's next row: with them it has as many positions as it may have tokens left,
        and as there are blocks for without preemption. Blocks are taken for what a draft model writes behind it, too.
        """
        drafter = occupancy.sequence.drafter
        if drafter is None or occupancy.num_pending:
            return ()
        most = min(self._config.q_len, occupancy.num_undrawn) - 1
        draft = drafter.propose(occupancy.sequence.generated, most) if most > 0 else ()
        # a draft model writes KV behind what it guesses from, too; what it has no room for, it guesses worse
        num_ahead = occupancy.num_ahead
        if not draft and not num_ahead:
            return ()
        wanted = min(len(draft) + max(1, num_ahead), occupancy.num_undrawn)
        return draft[: self.slots.grow(occupancy, wanted) - 1]

    def fill_prefill(self) -> Prefills:
        """Spend this partition's budget of a step: the unfinished prefill first, then whoever can be admitted."""
        found, budget = Prefills(), self._config.chunk_tokens
        while budget > 0 and len(found.chunks) < self._config.max_prefill_sequences:
            occupancy = self._prefilling or self.admission.admit(found.completed)
            if occupancy is None:
                break
            if occupancy.num_left > budget:
                self._prefilling = occupancy
                budget -= self._prefill_short(found, budget, occupancy)
            budget -= self._prefill(found, occupancy, budget)
        return found

    def _prefill_short(self, found: Prefills, budget: int, beside: Occupancy) -> int:
        """Prefills waiting sequences that fit whole into their share of the budget, `beside` one that the budget
        cuts. Returns how many tokens that takes.
        """
        share = int(budget * self._config.short_share)
        left = share - share % self._config.q_tile
        taken = 0
        while left > taken and len(found.chunks) < self._config.max_prefill_sequences - 1:
            occupancy = self.admission.admit_short(found.completed, left - taken, beside)
            if occupancy is None:
                break
            taken += self._prefill(found, occupancy, left - taken)
        return taken

    def _prefill(self, found: Prefills, occupancy: Occupancy, budget: int) -> int:
        """Adds the sequence's next chunk; returns how many tokens of the budget that takes."""
        start, end = occupancy.num_computed, min(occupancy.sequence.num_tokens, occupancy.num_computed + budget)
        is_last = end == occupancy.sequence.num_tokens
        followers = self.admission.fork(occupancy) if is_last else []
        samplers = [occupancy, *followers] if is_last else []
        found.chunks.append(occupancy.chunk(end, samplers))
        if is_last and self._prefilling is occupancy:
            self._prefilling = None
        occupancy.num_computed = end
        found.completed.update(self.slots.note(occupancy))
        found.occupancies += [occupancy, *followers]
        found.drawing += samplers
        found.forks += [(occupancy, follower) for follower in followers]
        return -(-(end - start) // self._config.q_tile) * self._config.q_tile

    def _make_room(self, occupancy: Occupancy) -> bool:
        """A block for the next token. False: blocks are about to come back, or this was the last and gave way."""
        while not self.slots.grow(occupancy):
            if self.slots.is_draining() or not self._preempt_for(occupancy):
                return False
        return True

    def _preempt_for(self, occupancy: Occupancy) -> bool:
        """The last gives way, be it running or landed. False where it is this one, or alone here."""
        running, landed = self.slots.running(), list(self.landed)
        if running == [occupancy] and not landed:
            return False  # leases hold the rest: to begin anew would only lose what it has
        self._totals.num_preemptions += 1
        if landed and landed[-1].leader.order > running[-1].sequence.order:
            self.admission.send_back(landed[-1])
        else:
            self.leave(running[-1], Phase.PREEMPTED)
        return occupancy.is_running

    # ---- who leaves

    def leave(self, occupancy: Occupancy, phase: Phase) -> None:
        """Schedule nothing more for this occupancy, and release what it holds once nothing in flight uses it."""
        occupancy.phase = phase
        if self._prefilling is occupancy:
            self._prefilling = None
        self.settle(occupancy)

    def settle(self, occupancy: Occupancy) -> None:
        """Release what an occupancy holds if it has left and nothing in flight uses it; a preempted one waits again."""
        if occupancy.is_running or occupancy.num_in_flight:
            return
        self.slots.leave(occupancy)
        if occupancy.phase is Phase.PREEMPTED:
            self.waiting.come_back(occupancy.sequence)

    def remove(self, accepted: Accepted) -> None:
        """Removes everything of one request; does nothing where the request is not here."""
        self.waiting.remove(accepted)
        self.landed.remove(accepted)
        for occupancy in self.slots:
            if occupancy.sequence.accepted is accepted:
                self.leave(occupancy, Phase.ENDED)

    # ---- what others may know

    @property
    def queued_tokens(self) -> int:
        """How many tokens are still to be prefilled for the requests that were accepted."""
        occupancy = self._prefilling
        return self.waiting.num_tokens + (occupancy.sequence.num_tokens - occupancy.num_computed if occupancy else 0)

    @property
    def active_tokens(self) -> int:
        """How many tokens the running sequences have, counting the most that launched steps may add."""
        return active_tokens(self.slots.running())

    @property
    def landed_tokens(self) -> int:
        """How many tokens the landed requests have, which wait for a slot."""
        return sum(landed_request.leader.num_tokens for landed_request in self.landed)

    @property
    def num_spare_slots(self) -> int:
        """Free slots, less one for each landed sequence that waits for one; negative where those are more."""
        return self.slots.num_free_slots - sum(landed_request.num_sequences for landed_request in self.landed)

    @property
    def num_blocks_to_grow(self) -> int:
        """How many blocks the sequences take that run here or have landed here, if each goes on by one column."""
        return sum(map(self.slots.num_blocks_to_grow, self.slots.running())) + self.landed.num_blocks_to_grow
