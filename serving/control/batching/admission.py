"""Who enters a slot, and with which blocks: three ways in.

Admitted, from the waiting line, with fresh blocks, to be prefilled: its head, or beside a long prefill a short one.
Forked, beside a leader whose prefill ends, sharing what it may of its blocks. Landed, with blocks whose KV was computed
elsewhere, to decode at once; the other choices of a landed request fork from its leader as it takes its slot. The
scheduler decides when each is tried, and `slots` keeps the account.

A landed request needs no blocks to enter, so it would always be served before a sequence that is before it and does.
Hence the last free slot is left to one before it that waits for admission, unless that one could not use it: nobody
runs in the partition, and landed requests or leases hold the blocks it lacks. Before another is who is more important,
and of equals the older one.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Set

from moonshard.kv.blocks import BlockPool
from moonshard.kv.prefix import PrefixCache
from moonshard.serving.control.batching.counters import Totals
from moonshard.serving.control.batching.landed import LandedRequest, LandedRequests
from moonshard.serving.control.batching.launches import Launches
from moonshard.serving.control.batching.queue import WaitingLine
from moonshard.serving.control.batching.sequence import Occupancy, Phase, Sequence
from moonshard.serving.control.batching.slots import Slots
from moonshard.serving.control.plan import CopyPlan, needs_slot_state

# Asked of a request that could be admitted now: True where blocks of it are being brought, by which it enters later.
Bring = Callable[[bytes], bool]


class Admission:
    """Decides who gets a slot of one partition."""

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache,
        slots: Slots,
        waiting: WaitingLine,
        landed: LandedRequests,
        launches: Launches,
        totals: Totals,
    ):
        self._pool = pool
        self._cache = cache
        self._totals = totals
        self._slots = slots
        self._waiting = waiting
        self._landed = landed
        self._launches = launches
        self.bring: Bring | None = None

    # ---- to be prefilled

    def admit(self, unlaunched: Set[int]) -> Occupancy | None:
        """Admits the head of the line, if a slot and blocks for its tokens and one more are free.

        `unlaunched` are blocks that are completed by the very step for which it is admitted: it may read them, but not
        copy them.
        """
        head = self._waiting.head()
        while head is not None and self._is_brought_first(head):
            head = self._waiting.head()
        return None if head is None else self._admit(head, unlaunched)

    def _is_brought_first(self, head: Sequence) -> bool:
        """Whether it is set aside, though it could enter, until blocks that somebody has of it are here."""
        if self.bring is None or not self._slots.num_free_slots:
            return False
        if self._slots.num_free_blocks < self._num_free_to_admit(head) or not self.bring(head.request.id):
            return False
        self._waiting.set_aside(head.request.id)
        return True

    def admit_short(self, unlaunched: Set[int], most_tokens: int, beside: Occupancy) -> Occupancy | None:
        """Admits the first with at most so many tokens to compute, while another's prefill is under way (`beside`).

        It overtakes longer ones, for the first of which a slot and its blocks are kept, but none that is more
        important, be it waiting or being prefilled. Where a landed request waits for a slot, at most one is free: the
        one that is kept.
        """
        head = self._waiting.head()
        if head is None:
            return None
        least = min(head.request.priority, beside.sequence.request.priority)
        peers = itertools.takewhile(lambda sequence: sequence.request.priority <= least, self._waiting)
        short = next((sequence for sequence in peers if self._is_short(sequence, most_tokens)), None)
        if short is None or not (short is head or self._leaves_room(short, head)):
            return None
        return self._admit(short, unlaunched)

    def _is_short(self, sequence: Sequence, most_tokens: int) -> bool:
        """Whether few tokens are to be computed: first by what was known when it came, which costs nothing to ask, then
        by what is known now.
        """
        if sequence.num_tokens - sequence.accepted.num_known_tokens > most_tokens:
            return False
        return sequence.num_tokens - len(self._to_share(sequence)) * self._pool.block_size <= most_tokens

    def _leaves_room(self, sequence: Sequence, first: Sequence) -> bool:
        """Whether the first in line, which it overtakes, would still find a slot and its blocks."""
        num_own = self._num_free_to_admit(sequence) + self._num_blocks_of_forks(sequence)
        return self._may_enter(sequence) and self._slots.num_free_blocks >= num_own + self._num_free_to_admit(first)

    def _admit(self, sequence: Sequence, unlaunched: Set[int]) -> Occupancy | None:
        occupancy = self._enter(sequence, unlaunched)
        if occupancy is not None:
            self._waiting.take(sequence)
            self._load_where_needed(occupancy)
            self._count_cached(occupancy)
        return occupancy

    def _enter(self, sequence: Sequence, unlaunched: Set[int]) -> Occupancy | None:
        """Enters with the blocks of its known tokens, the last of which is computed again to see what follows."""
        found = self._found(sequence)
        is_all = len(found) * self._pool.block_size == sequence.num_tokens
        if not found or not (is_all or self._cache.has_next_token_kv):
            return self._enter_behind(sequence, found)
        occupancy = None if found[-1] in unlaunched else self._enter_in_last(sequence, found)
        return occupancy or self._enter_behind(sequence, found[:-1])

    def _enter_behind(self, sequence: Sequence, found: tuple[int, ...]) -> Occupancy | None:
        occupancy = self._slots.enter_behind(sequence, self._num_blocks_to_admit(sequence), found)
        if occupancy is not None:
            occupancy.num_computed, occupancy.num_noted = len(found) * self._pool.block_size, len(found)
        return occupancy

    def _enter_in_last(self, sequence: Sequence, found: tuple[int, ...]) -> Occupancy | None:
        """Enters with these blocks, of the last of which the last token is computed again. That block is copied, since
        others may read the original.
        """
        partition, last = self._slots.partition, found[-1]
        self._cache.hold(partition, (last,))
        occupancy = self._enter_behind(sequence, found[:-1])
        if occupancy is None:
            self._pool.release(partition, (last,))
            return None
        occupancy.num_computed = len(found) * self._pool.block_size - 1
        copy = CopyPlan(
            number=self._launches.next_number(), pairs=((partition, last, occupancy.blocks[len(found) - 1]),)
        )
        self._launches.push(copy, [occupancy], borrowed=[(partition, last)])
        return occupancy

    def num_known_tokens(self, sequence: Sequence) -> int:
        """How many tokens need not be computed, as things are now."""
        num_found = len(self._found(sequence)) * self._pool.block_size
        if self._cache.has_next_token_kv:
            num_found = max(0, num_found - 1)
        return min(num_found, sequence.num_tokens - 1)

    def _to_share(self, sequence: Sequence) -> tuple[int, ...]:
        """The blocks that the cache has, without one that would be copied, and without that of the last known token,
        which is not always of use.
        """
        shareable = self._cache.shareable(self._found(sequence))
        return shareable[: (sequence.num_tokens - 1) // self._pool.block_size]

    def _found(self, sequence: Sequence) -> tuple[int, ...]:
        """The blocks that the cache has; none for a prompt whose log-probabilities only its computation gives."""
        if not self._cache.is_on or sequence.is_scored:
            return ()
        block_size = self._pool.block_size
        names = sequence.names(sequence.num_tokens // block_size, block_size)
        return self._cache.match(self._slots.partition, names)

    def _count_cached(self, occupancy: Occupancy) -> None:
        if occupancy.sequence.num_cached_tokens is None:
            occupancy.sequence.num_cached_tokens = occupancy.num_computed
            self._totals.cached_tokens += occupancy.num_computed

    def fork(self, leader: Occupancy) -> list[Occupancy]:
        """Let the choices that wait for this prefill join it; those without room prefill by themselves."""
        followers = self._enter_beside(leader, take_to_fork(leader.sequence))
        for follower in followers:
            self._load_where_needed(follower)
        return followers

    def copy_tails(self, forks: Iterable[tuple[Occupancy, Occupancy]]) -> None:
        """What a follower does not share with its leader is copied for it: mostly the last block, where that is partly
        filled, since the follower writes into it next.
        """
        pairs = list[tuple[int, int, int]]()
        occupancies = dict[Occupancy, None]()
        for leader, follower in forks:
            own = self._pool.groups.places_to_copy(len(leader.sequence.request.prompt), self._pool.block_size)
            if own:
                pairs += ((leader.slot.partition, leader.blocks[place], follower.blocks[place]) for place in own)
                occupancies |= dict.fromkeys((leader, follower))
        for plan in itertools.batched(pairs, self._slots.num_slots):  # as many as a step copies
            self._launches.push(CopyPlan(number=self._launches.next_number(), pairs=plan), list(occupancies))

    @property
    def num_blocks_due(self) -> int:
        """Blocks that the head of the line needs; 0 where nobody waits."""
        head = self._waiting.head()
        return 0 if head is None else self._num_free_to_admit(head)

    # ---- with KV that came from elsewhere

    def admit_landed(self) -> None:
        """Gives slots to landed requests, in their order, as long as there are any for them."""
        for landed_request in self._landed:
            if self._may_enter(landed_request.leader):
                self._landed.take(landed_request)
                self._begin_landed(landed_request)

    def send_back(self, landed_request: LandedRequest) -> None:
        """The landed request gives its blocks up, and each choice goes back to the line to be prefilled by itself."""
        self._landed.release(landed_request)
        for sequence in (landed_request.leader, *take_to_fork(landed_request.leader)):
            self._waiting.come_back(sequence)

    def _begin_landed(self, landed_request: LandedRequest) -> None:
        leader = self._slots.occupy(landed_request.leader, landed_request.blocks)
        followers = self._enter_beside(leader, take_to_fork(landed_request.leader))
        for occupancy in (leader, *followers):
            occupancy.phase, occupancy.num_computed = Phase.DECODE, len(landed_request.leader.request.prompt)
            self._slots.note(occupancy)
            self._load(occupancy)  # always: its input token was not sampled here
        self.copy_tails((leader, follower) for follower in followers)

    def _may_enter(self, sequence: Sequence) -> bool:
        """Whether a slot is free that nobody before it waits for."""
        num_free, head = self._slots.num_free_slots, self._waiting.head()
        if num_free != 1 or head is None or sequence.order < head.order:
            return num_free > 0
        lacks_blocks = self._slots.num_free_blocks < self._num_free_to_admit(head)
        return lacks_blocks and self._slots.is_empty

    # ---- what the ways have in common

    def _enter_beside(self, leader: Occupancy, sequences: list[Sequence]) -> list[Occupancy]:
        """The other choices that find room share blocks of the leader's prompt and own copies of the rest; those that
        do not go back to the line.
        """
        num_prompt = len(leader.sequence.request.prompt)
        shared = {place: leader.blocks[place] for place in self._shared_places(num_prompt)}
        followers = list[Occupancy]()
        for sequence in sequences:
            num_blocks = self._pool.num_blocks_for(num_prompt)
            occupancy = self._slots.enter(sequence, num_blocks, shared) if self._may_enter(sequence) else None
            if occupancy is None:
                self._waiting.come_back(sequence)
            else:
                followers.append(occupancy)
        return followers

    def _shared_places(self, num_prompt: int) -> Collection[int]:
        """Which of a prompt's blocks its choices share: the full ones, which nobody writes again."""
        return self._pool.groups.places_to_share(num_prompt // self._pool.block_size)

    def _num_blocks_of_forks(self, leader: Sequence) -> int:
        """How many blocks the choices that wait for this leader need for themselves, in order to go on."""
        num_prompt = len(leader.request.prompt)
        num_own = self._pool.num_blocks_for(num_prompt + 1) - len(self._shared_places(num_prompt))
        return len(leader.accepted.to_fork) * num_own

    def _num_blocks_to_admit(self, sequence: Sequence) -> int:
        return self._pool.num_blocks_for(sequence.num_tokens + 1)

    def _num_free_to_admit(self, sequence: Sequence) -> int:
        """How many blocks have to be free, including those free ones that already hold its beginning."""
        found = self._to_share(sequence)
        return self._pool.num_needed(self._slots.partition, self._num_blocks_to_admit(sequence), found)

    def _load_where_needed(self, occupancy: Occupancy) -> None:
        if needs_slot_state(occupancy.sequence.request):
            self._load(occupancy)

    def _load(self, occupancy: Occupancy) -> None:
        self._launches.push(occupancy.load(self._launches.next_number()), [occupancy])


def take_to_fork(leader: Sequence) -> list[Sequence]:
    """Removes and returns the choices that waited for this leader."""
    accepted = leader.accepted
    sequences, accepted.to_fork = accepted.to_fork, []
    return sequences
