"""The reservations of a decode worker: who waits for room in which partition, and for whom there is some now.

A pure state machine around `decode`, with one verb for each thing that a gateway, the scheduler, the device or the
clock may bring. Its process translates messages into verbs and does what is returned, in that order. Rules:

- The most important first, and of these first come, first served, within a partition; one that is full stops nobody
  elsewhere. Who waits too long is refused.
- At most one request comes ahead of its slot, so that none stands empty for a whole handoff, and so that those whom the
  scheduler itself has waiting do not take every slot before one can be reserved for.
- Blocks to grow into stay free for the sequences that run there, and what the next in the scheduler's own queue
  needs. Else those would be preempted for newcomers, and be overtaken for ever when they come back.
- A reservation is its owner's, whoever asked for it (a link to a gateway), until it has joined. What others say of it
  changes nothing, and they are told that there is none.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from moonshard.kv.blocks import BlockPool
from moonshard.kv.prefix import PrefixCache
from moonshard.serving.control.batching.queue import NeverFits
from moonshard.serving.control.fifo import Fifo, is_full
from moonshard.serving.control.handoff.decode import DecodeSide
from moonshard.serving.control.handoff.messages import (
    Cause,
    CopyOut,
    Credits,
    DecodeAction,
    Failed,
    Join,
    Land,
    Manifest,
    Reserve,
    Start,
    Target,
    Tell,
)
from moonshard.serving.control.request import Request


class SchedulerView(Protocol):
    """What the reservations must know of the scheduler's partitions."""

    def check(self, request: Request, partition: int | None = None) -> None:
        """Raises Rejected where the request could never join, however much room there is."""
        ...

    def num_spare_slots(self, partition: int) -> int:
        """Free slots, less those that requests which have joined still lack."""
        ...

    def num_blocks_to_grow(self, partition: int) -> int:
        """How many blocks its sequences take for their next tokens, if all of them need some."""
        ...

    def num_blocks_due(self, partition: int) -> int:
        """What the next in the scheduler's own queue needs."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ReservationsConfig:
    max_queued: int  # that wait for room; an equal share is each partition's, however many others have
    queue_timeout_s: float
    retry_after_s: float = 1.0  # told to whom is refused


# ---- what is asked of the process, besides to copy and to land


@dataclass(frozen=True, slots=True)
class Reserved[Owner: Hashable]:
    """Tell the owner its Target. The handoff has waited for room since `arrived_s`."""

    owner: Owner
    target: Target
    arrived_s: float


@dataclass(frozen=True, slots=True)
class NotHere[Owner: Hashable]:
    """Tell whoever spoke of a handoff that it is not here, so that one who still counts on it learns of that."""

    owner: Owner
    handoff: bytes


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A reservation is over because its owner gave it up."""

    handoff: bytes


@dataclass(frozen=True, slots=True)
class Enter[Owner: Hashable]:
    """Let the scheduler take the request. Its owner then gets its tokens; where the scheduler refuses, call
    `turned_down`.
    """

    owner: Owner
    join: Join


@dataclass(frozen=True, slots=True)
class CameBack:
    """Blocks or cells may have come back: let the scheduler launch first, whose own queue comes first, then call
    `admit`.
    """


type ReservationAction[Owner: Hashable] = (
    Reserved[Owner]
    | Tell[Owner, Credits | Failed]
    | NotHere[Owner]
    | GivenUp
    | Enter[Owner]
    | CameBack
    | CopyOut
    | Land
)
type Actions[Owner: Hashable] = tuple[ReservationAction[Owner], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Waiting[Owner: Hashable]:
    """A reservation without room yet."""

    reserve: Reserve
    request: Request
    owner: Owner
    arrived_s: float


class Reservations[Owner: Hashable]:
    """The reservations of one worker. `cache` knows which blocks begin a prompt and need not move."""

    def __init__(
        self,
        config: ReservationsConfig,
        side: DecodeSide,
        *,
        pool: BlockPool,
        slab: BlockPool,
        cache: PrefixCache,
        batch: SchedulerView,
    ):
        self._config = config
        self._side = side
        self._pool = pool
        self._slab = slab
        self._cache = cache
        self._batch = batch
        self._waiting = tuple(Fifo[_Waiting[Owner]](config.queue_timeout_s) for _ in range(pool.num_partitions))
        self._owners: dict[bytes, Owner] = {}  # of what is reserved and has not joined

    @property
    def num_handoffs(self) -> int:
        """How many handoffs wait for room, or are reserved and have not joined."""
        return sum(map(len, self._waiting)) + len(self._owners)

    def num_tokens(self, partition: int) -> int:
        """How many tokens the prompts have that are to come to the partition, those that wait for room included."""
        waiting = sum(len(waiting.request.prompt) for waiting in self._waiting[partition])
        return waiting + self._side.num_tokens_reserved(partition)

    # ---- what the gateway says

    def reserve(
        self, reserve: Reserve, request: Request, partition: int | None, owner: Owner, now_s: float
    ) -> Actions[Owner]:
        """Waits for room in `partition`. None: in one where there is room now, or else in the one where the fewest
        wait.

        Asked twice, it waits once and answers with the same target, and does not answer at all where it has joined
        already.

        Raises:
            Rejected: the request can never be served here, or another has one of its id; nothing is kept.
        """
        if self._side.has_joined(reserve.handoff):
            return ()
        if self._is_of_another(reserve.handoff, owner):
            raise NeverFits("id", "a request with this id is being served")
        if (target := self._side.target_of(reserve.handoff)) is not None:
            return (Reserved(owner, target, now_s),)
        if self._waiting_owners(reserve.handoff):
            return ()
        self._batch.check(request, partition)
        if partition is None:
            partition = self._roomiest(request)
        if is_full([len(queue) for queue in self._waiting], partition, self._config.max_queued):
            return (self._refuse(reserve.handoff, owner),)
        waiting = _Waiting(reserve=reserve, request=request, owner=owner, arrived_s=now_s)
        self._waiting[partition].append(waiting, now_s)
        return self.admit(now_s)

    def landed(self, manifest: Manifest, owner: Owner, now_s: float) -> Actions[Owner]:
        if not self._is_known(manifest.handoff, owner):
            return (NotHere(owner, manifest.handoff),)
        return self._addressed(self._side.landed(manifest, now_s))

    def start(self, start: Start[Manifest], owner: Owner, now_s: float) -> Actions[Owner]:
        if not self._is_known(start.handoff, owner):
            return (NotHere(owner, start.handoff),)
        return self._addressed(self._side.start(start, now_s))

    def drained(self, handoff: bytes, writer_epoch: int, now_s: float) -> Actions[Owner]:
        self._side.drained(handoff, writer_epoch)
        return self.admit(now_s)

    def cancel(self, handoff: bytes, owner: Owner, now_s: float) -> Actions[Owner]:
        """Gives a handoff up if it is this owner's. A request that has joined is ended by the scheduler instead."""
        given_up = self._give_up(handoff, owner, now_s)
        return (*given_up, CameBack()) if given_up else ()

    def close(self, owner: Owner, now_s: float) -> Actions[Owner]:
        """An owner is gone; everything of it is given up."""
        waiting = [waiting.reserve.handoff for queue in self._waiting for waiting in queue if waiting.owner == owner]
        reserved = [handoff for handoff, owned_by in self._owners.items() if owned_by == owner]
        given_up = [given_up for handoff in waiting + reserved for given_up in self._give_up(handoff, owner, now_s)]
        return (*given_up, CameBack()) if given_up else ()

    # ---- what the worker says

    def verified(self, ticket: int, is_intact: bool, now_s: float) -> Actions[Owner]:
        """The cells of a CopyOut were copied out, and the copy was compared with its checksums."""
        return (*self._addressed(self._side.verified(ticket, is_intact, now_s)), CameBack())

    def turned_down(self, join: Join) -> None:
        """The scheduler refused the request as a whole; its blocks come back."""
        self._pool.release(join.partition, join.block_table[::-1])
        self._side.left(join.handoff)

    def left(self, handoff: bytes, now_s: float) -> Actions[Owner]:
        """A request that had joined has ended."""
        self._side.left(handoff)
        return self.admit(now_s)

    def admit(self, now_s: float) -> Actions[Owner]:
        """Reserve for those who wait, as far as there is room for the first in each partition."""
        reserved: list[Reserved[Owner]] = []
        for partition, queue in enumerate(self._waiting):
            while (first := _first(queue)) is not None and (answer := self._admit(first, partition, now_s)) is not None:
                queue.remove(first)
                reserved.append(answer)
        return tuple(reserved)

    def expire(self, now_s: float) -> Actions[Owner]:
        late = [waiting for queue in self._waiting for waiting in queue.expire(now_s)]
        refused = (self._refuse(waiting.reserve.handoff, waiting.owner) for waiting in late)
        return (*refused, *self._addressed(self._side.expire(now_s)), CameBack())

    # ---- whose it is

    def _is_known(self, handoff: bytes, owner: Owner) -> bool:
        """Whether the handoff is this owner's or has joined: of one that has joined, messages are ignored and not
        answered with NotHere.
        """
        return self._owners.get(handoff, owner) == owner and self._side.knows(handoff)

    def _is_of_another(self, handoff: bytes, owner: Owner) -> bool:
        owners = *self._waiting_owners(handoff), self._owners.get(handoff, owner)
        return any(owned_by != owner for owned_by in owners)

    def _waiting_owners(self, handoff: bytes) -> list[Owner]:
        """The owner of a handoff that waits: at most one."""
        return [waiting.owner for queue in self._waiting for waiting in queue if waiting.reserve.handoff == handoff]

    def _give_up(self, handoff: bytes, owner: Owner, now_s: float) -> list[GivenUp]:
        for queue in self._waiting:
            for waiting in tuple(queue):
                if waiting.reserve.handoff == handoff and waiting.owner == owner:
                    queue.remove(waiting)
                    return [GivenUp(handoff)]
        if handoff not in self._owners or self._owners[handoff] != owner:
            return []
        del self._owners[handoff]
        self._side.cancel(handoff, now_s)
        return [GivenUp(handoff)]

    def _addressed(self, actions: tuple[DecodeAction, ...]) -> Actions[Owner]:
        """What the side asks, each with the owner that it concerns. A handoff that fails or joins has no owner here
        from then on.
        """
        addressed: list[ReservationAction[Owner]] = []
        for action in actions:
            match action:
                case Credits():
                    addressed.append(Tell(self._owners[action.handoff], action))
                case Failed():
                    addressed.append(Tell(self._owners.pop(action.handoff), action))
                case Join():
                    addressed.append(Enter(self._owners.pop(action.handoff), action))
                case _:
                    addressed.append(action)
        return tuple(addressed)

    # ---- room

    def _admit(self, waiting: _Waiting[Owner], partition: int, now_s: float) -> Reserved[Owner] | None:
        if not (self._has_place(partition) and self._has_blocks(waiting.request, partition)):
            return None
        found = self._found(waiting.request, partition)
        target = self._side.reserve(waiting.reserve, waiting.request, partition, found, now_s)
        if target is None:
            return None
        self._owners[target.handoff] = waiting.owner
        return Reserved(waiting.owner, target, waiting.arrived_s)

    def _found(self, request: Request, partition: int) -> tuple[int, ...]:
        """Cached blocks that begin the prompt and need not move. One whose last token was written for another
        continuation comes anew.
        """
        return self._cache.shareable(self._cache.match(partition, request.block_names))

    def _roomiest(self, request: Request) -> int:
        def room(partition: int) -> tuple[bool, int, int, int]:
            is_now = self._has_place(partition) and self._has_blocks(request, partition)
            num_found = len(self._found(request, partition))
            return is_now, num_found, -len(self._waiting[partition]), self._pool.num_free(partition)

        return max(range(self._pool.num_partitions), key=room)

    def _has_place(self, partition: int) -> bool:
        """Whether KV can land there, and at most one request would then wait for a slot: one that waits with its KV
        never expires.
        """
        num_spare = self._batch.num_spare_slots(partition) - self._side.num_choices_reserved(partition)
        return num_spare >= 0 and self._slab.num_free(partition) > 0

    def _has_blocks(self, request: Request, partition: int) -> bool:
        found = self._found(request, partition)
        num_needed = self._pool.num_needed(partition, self._pool.num_blocks_for(len(request.prompt)), found)
        num_kept = self._batch.num_blocks_to_grow(partition) + self._batch.num_blocks_due(partition)
        return self._pool.num_free(partition) - num_needed >= num_kept

    def _refuse(self, handoff: bytes, owner: Owner) -> Tell[Owner, Failed]:
        cause, retry_after_s = Cause.OVERLOADED, self._config.retry_after_s
        return Tell(owner, Failed(handoff=handoff, epoch=self._side.epoch, cause=cause, retry_after_s=retry_after_s))


def _first[Owner: Hashable](queue: Fifo[_Waiting[Owner]]) -> _Waiting[Owner] | None:
    """Of the most important the one that came first."""
    return min(queue, key=lambda waiting: waiting.request.priority, default=None)
