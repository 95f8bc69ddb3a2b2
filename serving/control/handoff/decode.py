"""The decode side of handoffs: what is reserved, which cells are granted, what landed, who may join the batch.

A pure state machine, so that a model check and a simulator run the very object that serves. One verb per event; each
decides and returns what to send and to do. Two resources are held, each a `BlockPool`: the final blocks of a prompt
(leased until it joins) and cells of the landing slab (leased while granted, used while being copied out). Rules:

- A cell counts as written only by a manifest of the reserved writer's epoch that names the cell's present grant.
- Only a private copy that matches its checksums is landed; one that does not fails the handoff.
- A request joins once, when it was started and its last missing block landed.
- Every reservation has a lease. Giving one up frees its blocks, which nobody but the local device thread writes, in
  launch order, and puts cells whose grants are out in quarantine.

Which blocks begin a prompt is for the caller to say, and who is reserved for in which order (`reservations`).
"""

import itertools
from dataclasses import dataclass, field

from moonshard.kv.blocks import BlockPool, SeenBlock
from moonshard.serving.control.handoff.messages import (
    Cause,
    CopyOut,
    Credits,
    DecodeAction,
    Failed,
    Grant,
    Join,
    Land,
    Manifest,
    Reserve,
    Start,
    Target,
)
from moonshard.serving.control.handoff.quarantine import OnRestore, Quarantine, keep
from moonshard.serving.control.request import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeSideConfig:
    session: str  # where the slab is written to; never reused by a later epoch
    lease_s: float
    quarantine_s: float
    max_cells_per_handoff: int


@dataclass(kw_only=True, slots=True)
class _Reservation:
    reserve: Reserve
    request: Request
    target: Target
    held_blocks: tuple[int, ...]
    own_blocks: tuple[int, ...]
    lease_end_s: float
    seen: tuple[SeenBlock, ...]  # of the prompt, what decode needs
    missing: set[int]  # of these, what has not landed
    granted: dict[int, int] = field(default_factory=dict[int, int])  # cell -> grant's number, until a manifest names it
    num_copying: int = 0
    tokens: tuple[int, ...] | None = None  # set by Start
    guesses: tuple[tuple[int, ...], ...] = ()
    started_s: float = 0.0  # likewise

    @property
    def block_table(self) -> tuple[int, ...]:
        return self.held_blocks + self.own_blocks

    def accepts(self, manifest: Manifest) -> bool:
        """Whether the reserved writer says this about grants that are out."""
        granted = all(self.granted.get(grant.cell) == grant.number for grant in manifest.grants)
        epochs = manifest.writer_epoch, manifest.target_epoch
        return granted and epochs == (self.reserve.writer_epoch, self.target.epoch)


@dataclass(frozen=True, slots=True)
class _Copying:
    reservation: _Reservation
    manifest: Manifest


class DecodeSide:
    """The handoffs that one process receives. `slab` counts the landing slab's cells, one block each."""

    def __init__(
        self,
        config: DecodeSideConfig,
        epoch: int,
        pool: BlockPool,
        slab: BlockPool,
        *,
        on_restore: OnRestore = keep,
    ):
        self.config = config
        self.epoch = epoch
        self._pool = pool
        self._slab = slab
        self._quarantine = Quarantine(slab, config.quarantine_s, on_restore)
        self._reservations: dict[bytes, _Reservation] = {}
        self._copying: dict[int, _Copying] = {}  # by ticket
        self._joined: set[bytes] = set()
        self._tickets = itertools.count()
        self._grant_numbers = itertools.count()

    @property
    def num_reservations(self) -> int:
        return len(self._reservations)

    def num_choices_reserved(self, partition: int) -> int:
        """How many sequences of the present reservations may join in that partition."""
        reservations = (r for r in self._reservations.values() if r.target.partition == partition)
        return sum(r.request.n for r in reservations)

    def num_tokens_reserved(self, partition: int) -> int:
        """How many tokens the prompts have that are reserved in that partition."""
        reservations = (r for r in self._reservations.values() if r.target.partition == partition)
        return sum(len(r.request.prompt) for r in reservations)

    def knows(self, handoff: bytes) -> bool:
        """Whether the handoff is reserved here or has joined."""
        return handoff in self._reservations or handoff in self._joined

    def has_joined(self, handoff: bytes) -> bool:
        return handoff in self._joined

    def target_of(self, handoff: bytes) -> Target | None:
        """The Target of a handoff that is reserved and has not joined."""
        reservation = self._reservations.get(handoff)
        return None if reservation is None else reservation.target

    # ---- the verbs of a handoff

    def reserve(
        self, reserve: Reserve, request: Request, partition: int, held_blocks: tuple[int, ...], now_s: float
    ) -> Target | None:
        """Hold a sequence's blocks for the whole prompt, and a cell at least if any is to move.

        `held_blocks` are kept blocks that begin the prompt, used or free. Where they are all of it, the last manifest
        names none. None, and nothing is held, where blocks or cells are lacking, or it has joined; asked twice, it
        answers with the same target.
        """
        if reserve.handoff in self._joined:
            return None
        if reserve.handoff in self._reservations:
            return self._reservations[reserve.handoff].target
        num_blocks = self._pool.num_blocks_for(len(request.prompt))
        seen = self._pool.seen(len(request.prompt))
        held = held_blocks[:num_blocks]
        num_missing = len(seen) - len(held)
        self._pool.hold(partition, held)
        has_cell = num_missing == 0 or self._slab.num_free(partition) > 0
        own = self._pool.lease(partition, num_blocks - len(held)) if has_cell else None
        if own is None:
            self._pool.release(partition, held[::-1])
            return None
        grants = self._grant(partition, min(num_missing, self.config.max_cells_per_handoff))
        lease_s = min(self.config.lease_s, reserve.lease_s)
        target = self._target(reserve, partition, len(seen), len(held), grants, lease_s)
        self._reservations[reserve.handoff] = _Reservation(
            reserve=reserve,
            request=request,
            target=target,
            held_blocks=held,
            own_blocks=own,
            lease_end_s=now_s + lease_s,
            seen=seen,
            missing=set(range(len(held), len(seen))),
            granted={grant.cell: grant.number for grant in grants},
        )
        return target

    def landed(self, manifest: Manifest, now_s: float) -> tuple[DecodeAction, ...]:
        """Cells were written. A manifest that is stale, comes twice or is of another epoch changes nothing."""
        reservation = self._reservations.get(manifest.handoff)
        if reservation is None or not reservation.accepts(manifest):
            return ()
        cells = tuple(grant.cell for grant in manifest.grants)
        is_paired = 0 < len(cells) == len(set(cells)) == len(set(manifest.blocks))
        if not is_paired or not reservation.missing.issuperset(manifest.blocks):
            return self._fail(reservation, Cause.CORRUPT, now_s)
        for cell in cells:
            del reservation.granted[cell]
        partition = reservation.target.partition
        self._slab.land(partition, cells)
        reservation.num_copying += len(cells)
        ticket = next(self._tickets)
        self._copying[ticket] = _Copying(reservation, manifest)
        checksums, pieces = manifest.checksums, manifest.pieces
        return (CopyOut(ticket=ticket, partition=partition, cells=cells, checksums=checksums, pieces=pieces),)

    def verified(self, ticket: int, is_intact: bool, now_s: float) -> tuple[DecodeAction, ...]:
        """The cells of a CopyOut were copied out, and the copy was compared with its checksums."""
        copying = self._copying.pop(ticket)
        reservation, manifest = copying.reservation, copying.manifest
        partition = reservation.target.partition
        self._slab.release(partition, [grant.cell for grant in manifest.grants])
        reservation.num_copying -= len(manifest.grants)
        if self._reservations.get(manifest.handoff) is not reservation:
            return ()  # given up meanwhile
        if not is_intact or not reservation.missing.issuperset(manifest.blocks):
            return self._fail(reservation, Cause.CORRUPT, now_s)
        reservation.missing -= set(manifest.blocks)
        blocks = tuple(reservation.block_table[reservation.seen[index].place] for index in manifest.blocks)
        land = Land(ticket=ticket, partition=partition, blocks=blocks)
        return (land, *self._credit(reservation, len(manifest.grants)), *self._join(reservation))

    def start(self, start: Start[Manifest], now_s: float) -> tuple[DecodeAction, ...]:
        """The first tokens have come, with the manifest that completes the prompt."""
        reservation = self._reservations.get(start.handoff)
        if reservation is None or reservation.tokens is not None or not reservation.accepts(start.last):
            return ()
        reservation.tokens, reservation.guesses, reservation.started_s = start.tokens, start.guesses, now_s
        if not (reservation.missing or start.last.blocks):
            return self._join(reservation)
        return self.landed(start.last, now_s)

    def left(self, handoff: bytes) -> None:
        """A request that had joined left the batch, and the scheduler gave its blocks back."""
        self._joined.discard(handoff)

    # ---- giving up

    def cancel(self, handoff: bytes, now_s: float) -> None:
        """Gives a reservation up. A request that has joined is ended by the scheduler instead."""
        reservation = self._reservations.get(handoff)
        if reservation is not None:
            self._give_up(reservation, now_s)

    def drained(self, handoff: bytes, writer_epoch: int) -> None:
        self._quarantine.drained(handoff, writer_epoch)

    def expire(self, now_s: float) -> tuple[DecodeAction, ...]:
        self._quarantine.expire(now_s)
        overdue = [r for r in self._reservations.values() if r.lease_end_s <= now_s]
        return tuple(itertools.chain.from_iterable(self._fail(r, Cause.LEASE, now_s) for r in overdue))

    # ---- decisions

    def _target(
        self,
        reserve: Reserve,
        partition: int,
        num_blocks: int,
        num_held: int,
        grants: tuple[Grant, ...],
        lease_s: float,
    ) -> Target:
        return Target(
            handoff=reserve.handoff,
            epoch=self.epoch,
            writer_epoch=reserve.writer_epoch,
            session=self.config.session,
            partition=partition,
            num_blocks=num_blocks,
            num_blocks_held=num_held,
            grants=grants,
            lease_s=lease_s,
        )

    def _grant(self, partition: int, max_cells: int) -> tuple[Grant, ...]:
        cells = self._slab.lease(partition, min(max_cells, self._slab.num_free(partition)))
        return tuple(Grant(cell, next(self._grant_numbers)) for cell in cells or ())

    def _credit(self, reservation: _Reservation, num_returned: int) -> tuple[Credits, ...]:
        """Grants as many cells as came back to this reservation, if as many of its blocks still lack one. So no handoff
        loses its last cell to another.
        """
        num_lacking = len(reservation.missing) - len(reservation.granted) - reservation.num_copying
        grants = self._grant(reservation.target.partition, min(num_returned, num_lacking))
        if not grants:
            return ()
        reservation.granted |= {grant.cell: grant.number for grant in grants}
        return (Credits(handoff=reservation.reserve.handoff, target_epoch=self.epoch, grants=grants),)

    def _join(self, reservation: _Reservation) -> tuple[Join, ...]:
        if reservation.tokens is None or reservation.missing:
            return ()
        handoff, partition = reservation.reserve.handoff, reservation.target.partition
        del self._reservations[handoff]
        self._joined.add(handoff)
        self._pool.land(partition, reservation.own_blocks)
        return (
            Join(
                handoff=handoff,
                request=reservation.request,
                partition=partition,
                block_table=reservation.block_table,
                tokens=reservation.tokens,
                guesses=reservation.guesses,
                started_s=reservation.started_s,
            ),
        )

    def _fail(self, reservation: _Reservation, cause: Cause, now_s: float) -> tuple[Failed, ...]:
        self._give_up(reservation, now_s)
        return (Failed(handoff=reservation.reserve.handoff, epoch=self.epoch, cause=cause),)

    def _give_up(self, reservation: _Reservation, now_s: float) -> None:
        handoff, partition = reservation.reserve.handoff, reservation.target.partition
        del self._reservations[handoff]
        cells = tuple(reservation.granted)
        self._quarantine.add(handoff, reservation.reserve.writer_epoch, partition, cells, now_s)
        self._pool.land(partition, reservation.own_blocks)
        self._pool.release(partition, reservation.block_table[::-1])
