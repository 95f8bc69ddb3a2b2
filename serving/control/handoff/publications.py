"""The publications of a prefill worker: which blocks of which prompts are complete, and when a handoff is over there.

A pure state machine around `prefill`, with one verb for each thing that a gateway, the engine, the device or the clock
may bring. Its process translates messages into verbs and does what is returned, in that order. Rules:

- A request for a handoff runs as one that ends with its first token. The first tokens of all its choices are told
  together, and are not told of one that was given up.
- What is complete is published right behind the step that completes it. What earlier steps wrote of a prompt need not
  wait for its first step; a prompt may also begin behind blocks that this very step writes for another: these wait.
- A handoff is its owner's, whoever asked for it (a link to a gateway). Whatever ends it early ends its prefill too.
"""

import itertools
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from moonshard.kv.blocks import BlockPool, SeenBlock
from moonshard.kv.prefix import PrefixCache
from moonshard.serving.control.handoff.messages import (
    CopyIn,
    Credits,
    Drained,
    Failed,
    FirstTokens,
    Manifest,
    PrefillAction,
    Stop,
    Target,
    Tell,
    Write,
    guesses_of,
)
from moonshard.serving.control.handoff.prefill import PrefillSide
from moonshard.serving.control.plan import PrefillChunk, PrefillPlan
from moonshard.serving.control.request import FinishReason, Output, Request


@dataclass(frozen=True, slots=True)
class Over:
    """Nothing more is said of this handoff, and nothing of it is held. `is_done`: all was published and told."""

    handoff: bytes
    is_done: bool


type Told = Manifest | FirstTokens | Drained | Failed
type PublicationAction[Owner: Hashable] = Tell[Owner, Told] | CopyIn | Write | Stop | Over
type Actions[Owner: Hashable] = tuple[PublicationAction[Owner], ...]


@dataclass(eq=False, kw_only=True, slots=True)
class _Publication[Owner: Hashable]:
    """One handoff's part here, from Run until everything was published and told, or given up."""

    owner: Owner
    request: Request  # as the client asked
    target: Target
    seen: tuple[SeenBlock, ...]  # of the prompt, what decode needs
    arrived_s: float
    partition: int | None = None  # of this worker, once a step for it was launched or is about to be
    num_finished: int = 0  # of these, whose KV launched steps complete
    first: dict[int, Output] = field(default_factory=dict[int, Output])  # by choice
    is_told: bool = False  # the first tokens were
    is_published: bool = False
    is_given_up: bool = False

    @property
    def is_done(self) -> bool:
        return self.is_published and self.is_told


def prefill_of(request: Request) -> Request:
    """What the engine is given for a handoff."""
    return replace(request, max_tokens=1)


def finish_of(request: Request, output: Output) -> FinishReason | None:
    """Whether the first token of a choice is its last, for the client and not only here."""
    is_cut = output.finish is FinishReason.LENGTH and request.max_tokens > 1
    return None if is_cut else output.finish


class Publications[Owner: Hashable]:
    """The publications of one worker."""

    def __init__(self, side: PrefillSide, *, pool: BlockPool, cache: PrefixCache):
        self._side = side
        self._pool = pool
        self._cache = cache
        self._legs: dict[bytes, _Publication[Owner]] = {}

    @property
    def num_handoffs(self) -> int:
        return max(len(self._legs), self._side.num_runs)

    def is_here(self, handoff: bytes) -> bool:
        return handoff in self._legs

    def is_of(self, handoff: bytes, owner: Owner) -> bool:
        return handoff in self._legs and self._legs[handoff].owner == owner

    def owner_of(self, handoff: bytes) -> Owner:
        """Of a handoff that is here."""
        return self._legs[handoff].owner

    def has_begun(self, handoff: bytes) -> bool:
        """Whether a step of its prefill was launched: what follows from that is to be given up, not withdrawn."""
        return self._legs[handoff].partition is not None

    def is_being_given_up(self, handoff: bytes) -> bool:
        """Whether the handoff was given up and is not over yet: it cannot begin again before that."""
        return handoff not in self._legs and self._side.holds(handoff)

    # ---- what the gateway says

    def begin(self, target: Target, request: Request, owner: Owner, now_s: float) -> None:
        """Begins a handoff that is neither here nor being given up. The caller then gives its prefill to the engine, or
        calls `withdraw`.
        """
        seen = self._pool.seen(len(request.prompt))
        publication = _Publication(owner=owner, request=request, target=target, seen=seen, arrived_s=now_s)
        self._legs[request.id] = publication

    def withdraw(self, handoff: bytes) -> Owner:
        """The engine refuses the prefill, at once or after it has waited; nothing of it had begun."""
        return self._legs.pop(handoff).owner

    def credits(self, credits: Credits) -> Actions[Owner]:
        return self._addressed(self._side.credits(credits))

    def give_up(self, handoff: bytes, owner: Owner) -> Actions[Owner]:
        """Gives a handoff up if it is this owner's; does nothing for any other."""
        if not self.is_of(handoff, owner):
            return ()
        return self.cancel(handoff, self._legs[handoff].target.epoch, owner)

    def cancel(self, handoff: bytes, target_epoch: int, owner: Owner) -> Actions[Owner]:
        """Gives a handoff up and answers Drained when that is true, at once for a handoff that is not here.

        Does nothing for a handoff of another owner.
        """
        if handoff in self._legs:
            if not self.is_of(handoff, owner):
                return ()
            self._legs[handoff].is_given_up = True
            stop = () if self._side.knows(handoff) else (Stop(handoff=handoff),)
            return self._addressed((*stop, *self._side.cancel(handoff, target_epoch)))
        drained = (action for action in self._side.cancel(handoff, target_epoch) if isinstance(action, Drained))
        return tuple(Tell(owner, action) for action in drained)

    def close(self, owner: Owner) -> Actions[Owner]:
        """An owner is gone; all of its handoffs are given up."""
        owned = [handoff for handoff, leg in self._legs.items() if leg.owner == owner]
        return tuple(action for handoff in owned for action in self.give_up(handoff, owner))

    # ---- what the engine says

    def launching(self, plan: PrefillPlan, now_s: float) -> Actions[Owner]:
        """A prefill step is about to be launched: the blocks of its prompts are complete but for those that the step
        itself writes. Only behind blocks that were found does a prompt begin later than at its first token, and then
        a block's place is its column.
        """
        written = {(chunk.slot.partition, block) for chunk in plan.chunks for block in self._written(chunk)}
        actions: list[PrefillAction] = []
        for leg, chunk in self._chunks(plan):
            if leg.partition is None:
                self._run(leg, chunk, now_s)
                blocks = chunk.block_table[: chunk.start // self._pool.block_size]
                known = ((chunk.slot.partition, block) for block in blocks)
                num_earlier = sum(1 for _ in itertools.takewhile(lambda place: place not in written, known))
                actions += self._finish(leg, chunk, num_earlier)
        return self._addressed(actions)

    def launched(self, plan: PrefillPlan) -> Actions[Owner]:
        """A prefill step was launched: what it completes may be copied right behind it."""
        actions: list[PrefillAction] = []
        for leg, chunk in self._chunks(plan):
            end = chunk.start + len(chunk.tokens)
            num_written = -(-end // self._pool.block_size) if chunk.samples else end // self._pool.block_size
            actions += self._finish(leg, chunk, num_written)
        return self._addressed(actions)

    def emitted(self, output: Output) -> Actions[Owner]:
        """A handoff that is here has a first token."""
        leg = self._legs[output.sequence.request_id]
        leg.first[output.sequence.choice] = output
        if len(leg.first) < leg.request.n or leg.is_given_up:
            return ()
        leg.is_told = True
        outputs = [leg.first[choice] for choice in range(leg.request.n)]
        first = FirstTokens(
            handoff=leg.request.id,
            writer_epoch=self._side.epoch,
            target_epoch=leg.target.epoch,
            tokens=tuple(output.token_ids[0] for output in outputs),
            is_finished=all(finish_of(leg.request, output) for output in outputs),
            guesses=guesses_of(output.guesses for output in outputs),
        )
        return self._addressed((first,))

    # ---- what the device and the transfer say

    def handoff_of(self, ticket: int) -> bytes:
        """The handoff whose piece is being staged or written under this ticket."""
        return self._side.handoff_of(ticket)

    def staged(self, ticket: int) -> Actions[Owner]:
        """The pages of a CopyIn were copied out. Without a Write of that ticket it was given up meanwhile."""
        return self._addressed(self._side.staged(ticket))

    def written(self, ticket: int, checksums: tuple[int, ...]) -> Actions[Owner]:
        return self._addressed(self._side.written(ticket, checksums))

    def write_failed(self, ticket: int, now_s: float) -> Actions[Owner]:
        return self._addressed(self._side.write_failed(ticket, now_s))

    def expire(self, now_s: float) -> Actions[Owner]:
        return self._addressed(self._side.expire(now_s))

    # ---- blocks

    def _written(self, chunk: PrefillChunk) -> tuple[int, ...]:
        """The blocks that the chunk's tokens lie in."""
        end = chunk.start + len(chunk.tokens)
        return chunk.block_table[chunk.start // self._pool.block_size : self._pool.num_blocks_for(end)]

    def _chunks(self, plan: PrefillPlan) -> Iterator[tuple[_Publication[Owner], PrefillChunk]]:
        for chunk in plan.chunks:
            leg = self._legs.get(chunk.request.id)
            if leg is not None and not leg.is_given_up and chunk.sequence.choice == 0:
                yield leg, chunk

    def _run(self, leg: _Publication[Owner], chunk: PrefillChunk, now_s: float) -> None:
        """Its lease is what is left of it: it has waited for its first step."""
        target = replace(leg.target, lease_s=leg.target.lease_s - (now_s - leg.arrived_s))
        self._side.run(target, chunk.slot.partition, now_s)
        leg.partition = chunk.slot.partition

    def _finish(self, leg: _Publication[Owner], chunk: PrefillChunk, num_columns: int) -> tuple[PrefillAction, ...]:
        """So many columns are complete."""
        blocks: list[tuple[int, int]] = []
        for seen in itertools.islice(leg.seen, leg.num_finished, None):
            if seen.column >= num_columns:
                break
            blocks.append((leg.num_finished, chunk.block_table[seen.place]))
            leg.num_finished += 1
        return self._side.finished(leg.target.handoff, blocks)

    # ---- what follows

    def _addressed(self, actions: Iterable[PrefillAction]) -> Actions[Owner]:
        """What the side asks, each with the owner that it concerns. All that it stops is given up before the engine
        hears of any.
        """
        addressed: list[PublicationAction[Owner]] = []
        for action in actions:
            match action:
                case Stop():
                    self._legs[action.handoff].is_given_up = True
                    addressed.append(action)
                case Manifest():
                    self._legs[action.handoff].is_published = action.is_last
                    addressed.append(Tell(self._legs[action.handoff].owner, action))
                case FirstTokens() | Drained() | Failed():
                    addressed.append(Tell(self._legs[action.handoff].owner, action))
                case _:
                    addressed.append(action)
        return (*addressed, *self._sweep())

    def _sweep(self) -> list[Over]:
        """Forget the handoffs that are over. Their blocks came back as they were staged: the beginning first."""
        over: list[Over] = []
        for handoff, leg in tuple(self._legs.items()):
            if (leg.is_done or leg.is_given_up) and not self._side.knows(handoff):
                del self._legs[handoff]
                over.append(Over(handoff, leg.is_done))
                if leg.partition is not None:
                    self._cache.renew(leg.partition, leg.request.block_names)
        return over
