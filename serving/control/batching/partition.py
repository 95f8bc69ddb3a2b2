"""One partition of the scheduler: who waits for it, who lives in it, and what its part of the next step holds.

A request lives in one partition for life, so partitions have nothing in common but the steps: a step runs on all of
them at once, and each fills its own rows. A partition that is full stops nobody elsewhere. Stands apart from the
scheduler, which decides whether the next step prefills or decodes. Left out: requests as a whole, and results.
"""

from dataclasses import dataclass, field

from moonshard.kv.blocks import BlockPool
from moonshard.kv.prefix import PrefixCache
from moonshard.serving.control.batching.admission import Seating
from moonshard.serving.control.batching.counters import Totals
from moonshard.serving.control.batching.landed import Joiners
from moonshard.serving.control.batching.launches import Launches
from moonshard.serving.control.batching.queue import WaitingLine
from moonshard.serving.control.batching.sequence import Accepted, Phase, Stay
from moonshard.serving.control.batching.slots import Residents
from moonshard.serving.control.plan import PrefillChunk


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneConfig:
    """`chunk_tokens` is a partition's budget of a prefill step, where a sequence's chunk counts padded to `q_tile`.

    Of what a sequence would be cut by, it leaves `short_share` to those that fit into that whole.
    """

    slots_per_partition: int
    chunk_tokens: int
    short_share: float = 0.5
    q_tile: int = 1
    max_prefill_sequences: int = 8
    queue_timeout_s: float

    def __post_init__(self) -> None:
        if min(self.slots_per_partition, self.q_tile, self.max_prefill_sequences) < 1:
            raise ValueError("slots, tile and sequences of a prefill step are at least 1")
        if self.chunk_tokens < 1 or self.chunk_tokens % self.q_tile:
            raise ValueError(f"chunk_tokens {self.chunk_tokens} is not a multiple of q_tile {self.q_tile}")
        if not 0 <= self.short_share < 1:
            raise ValueError(f"short_share {self.short_share} is not in [0, 1)")


@dataclass(eq=False, kw_only=True, slots=True)
class Prefills:
    """A partition's part of a prefill step."""

    chunks: list[PrefillChunk] = field(default_factory=list)
    stays: list[Stay] = field(default_factory=list)  # that the step uses
    drawing: list[Stay] = field(default_factory=list)
    forks: list[tuple[Stay, Stay]] = field(default_factory=list)
    completed: set[int] = field(default_factory=set)  # blocks, by this very step


class Lane:
    """A partition's line, joiners and residents, and the rules by which they meet."""

    def __init__(
        self,
        config: LaneConfig,
        pool: BlockPool,
        cache: PrefixCache,
        partition: int,
        launches: Launches,
        totals: Totals,
    ):
        self.partition = partition
        self.residents = Residents(pool, cache, partition, config.slots_per_partition)
        self.waiting = WaitingLine(config.queue_timeout_s)
        self.joiners = Joiners(pool, partition)
        self.seating = Seating(pool, cache, self.residents, self.waiting, self.joiners, launches, totals)
        self._config = config
        self._totals = totals
        self._prefilling: Stay | None = None  # the one whose prefill the last budget cut

    # ---- what a step holds

    def ready_to_decode(self) -> list[Stay]:
        """Those with a block for their next token, oldest first; makes room by preemption."""
        is_starved = False  # an older one already waits: no need to look again
        ready = []
        for stay in self.residents:
            if not stay.can_decode:
                continue
            if self.residents.grow(stay) or (not is_starved and self._make_room(stay)):
                ready.append(stay)
            else:
                is_starved = True
        return ready

    def fill_prefill(self) -> Prefills:
        """Spend this partition's budget of a step: the unfinished prefill first, then whoever can be admitted."""
        found, budget = Prefills(), self._config.chunk_tokens
        while budget > 0 and len(found.chunks) < self._config.max_prefill_sequences:
            stay = self._prefilling or self.seating.admit(found.completed)
            if stay is None:
                break
            if stay.num_left > budget:
                self._prefilling = stay
                budget -= self._prefill_short(found, budget)
            budget -= self._prefill(found, stay, budget)
        return found

    def _prefill_short(self, found: Prefills, budget: int) -> int:
        """Those who wait and fit whole into their share of the budget, beside one that it cuts; what they take."""
        share = int(budget * self._config.short_share)
        left = share - share % self._config.q_tile
        taken = 0
        while left > taken and len(found.chunks) < self._config.max_prefill_sequences - 1:
            stay = self.seating.admit_short(found.completed, left - taken)
            if stay is None:
                break
            taken += self._prefill(found, stay, left - taken)
        return taken

    def _prefill(self, found: Prefills, stay: Stay, budget: int) -> int:
        """Its next chunk; what that takes of the budget."""
        start, end = stay.num_computed, min(stay.sequence.num_tokens, stay.num_computed + budget)
        is_last = end == stay.sequence.num_tokens
        followers = self.seating.fork(stay) if is_last else []
        samplers = [stay, *followers] if is_last else []
        found.chunks.append(stay.chunk(end, samplers))
        if is_last and self._prefilling is stay:
            self._prefilling = None
        stay.num_computed = end
        found.completed.update(self.residents.note(stay))
        found.stays += [stay, *followers]
        found.drawing += samplers
        found.forks += [(stay, follower) for follower in followers]
        return -(-(end - start) // self._config.q_tile) * self._config.q_tile

    def _make_room(self, stay: Stay) -> bool:
        """A block for the next token. False: blocks are about to come back, or this was the youngest and gave way."""
        while not self.residents.grow(stay):
            if self.residents.is_draining() or not self._preempt_for(stay):
                return False
        return True

    def _preempt_for(self, stay: Stay) -> bool:
        """The youngest gives way: joiners arrived last. False where it is this one, or alone here."""
        running, joiners = self.residents.running(), list(self.joiners)
        if running == [stay] and not joiners:
            return False  # leases hold the rest: to begin anew would only lose what it has
        self._totals.num_preemptions += 1
        if joiners:
            self.seating.send_back(joiners[-1])
        else:
            self.leave(running[-1], Phase.PREEMPTED)
        return stay.is_running

    # ---- who leaves

    def leave(self, stay: Stay, phase: Phase) -> None:
        """Schedule nothing more for this stay, and release what it holds once nothing in flight uses it."""
        stay.phase = phase
        if self._prefilling is stay:
            self._prefilling = None
        self.settle(stay)

    def settle(self, stay: Stay) -> None:
        """Release what a stay holds if it has left and nothing in flight uses it; a preempted one waits again."""
        if stay.is_running or stay.num_in_flight:
            return
        self.residents.leave(stay)
        if stay.phase is Phase.PREEMPTED:
            self.waiting.come_back(stay.sequence)

    def remove(self, accepted: Accepted) -> None:
        """Removes everything of one request, which need not be here."""
        self.waiting.remove(accepted)
        self.joiners.remove(accepted)
        for stay in self.residents:
            if stay.sequence.accepted is accepted:
                self.leave(stay, Phase.ENDED)

    # ---- what others may know

    @property
    def queued_tokens(self) -> int:
        """Still to be prefilled for what has been accepted."""
        stay = self._prefilling
        return self.waiting.num_tokens + (stay.sequence.num_tokens - stay.num_computed if stay else 0)

    @property
    def active_tokens(self) -> int:
        """Known or drawn, of running sequences."""
        return sum(stay.sequence.num_tokens + stay.num_pending for stay in self.residents.running())

    @property
    def joining_tokens(self) -> int:
        """Of those who have their KV here and wait for a slot."""
        return sum(joiner.leader.num_tokens for joiner in self.joiners)

    @property
    def num_free_seats(self) -> int:
        """The free slots that are left once all who have joined sit; below 0 where they lack some."""
        return self.residents.num_free_slots - sum(joiner.num_sequences for joiner in self.joiners)

    @property
    def num_sequences(self) -> int:
        """Those that may need another block: what runs here, and what has joined here."""
        return len(self.residents.running()) + sum(joiner.num_sequences for joiner in self.joiners)
