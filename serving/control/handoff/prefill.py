"""The prefill side of handoffs: which finished blocks may be published now, and what must be held until they are.

A pure state machine with one verb per event. A finished block waits in its handoff's queue, its pages held by
reference, until there is a grant to write into and a free cell of the own slab to stage it in; then it is staged,
written, and named in a manifest. Rules:

- Every grant is used once, whatever is said twice.
- Pages are held until they are staged, a source cell until its write has ended; where a write failed, quarantine.
- `Drained` is said only when no write is under way and none failed: a failed write may still arrive.

Requests are published in the order of their arrival. Which blocks a step finishes, `publications` knows.
"""

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from moonshard.kv.blocks import BlockPool
from moonshard.serving.control.handoff.messages import (
    Cause,
    CopyIn,
    Credits,
    Drained,
    Failed,
    Grant,
    Manifest,
    PrefillAction,
    Stop,
    Target,
    Write,
)
from moonshard.serving.control.handoff.quarantine import OnRestore, Quarantine, keep


@dataclass(kw_only=True, slots=True)
class _Run:
    target: Target
    partition: int  # of this worker
    lease_end_s: float
    grants: deque[Grant]
    grants_seen: set[int]
    num_left: int  # blocks that are not written
    # (number of the block as in the Target, block), each block retained
    queue: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])
    num_publishing: int = 0
    is_aborted: bool = False
    is_tainted: bool = False  # a write of it failed


@dataclass(frozen=True, kw_only=True, slots=True)
class _Publishing:
    run: _Run
    pieces: tuple[tuple[int, int], ...]
    cells: tuple[int, ...]
    grants: tuple[Grant, ...]


class PrefillSide:
    """The handoffs that one process sends. `slab` counts the staging slab's cells, one block each."""

    def __init__(
        self,
        epoch: int,
        pool: BlockPool,
        slab: BlockPool,
        quarantine_s: float,
        *,
        on_restore: OnRestore = keep,
    ):
        self.epoch = epoch
        self._pool = pool
        self._slab = slab
        self._quarantine = Quarantine(slab, quarantine_s, on_restore)
        self._runs: dict[bytes, _Run] = {}
        self._aborted: dict[bytes, _Run] = {}  # with pieces under way
        self._publishing: dict[int, _Publishing] = {}  # by ticket
        self._tickets = itertools.count()

    @property
    def num_runs(self) -> int:
        return len(self._runs) + len(self._aborted)

    def knows(self, handoff: bytes) -> bool:
        """Whether something of the handoff is still to be published, or to be drained."""
        return handoff in self._runs or handoff in self._aborted

    def holds(self, handoff: bytes) -> bool:
        """Whether `run` would refuse the handoff: it is under way, or was given up and is not over yet."""
        return self.knows(handoff) or self._quarantine.holds(handoff)

    def handoff_of(self, ticket: int) -> bytes:
        """The handoff whose piece is being staged or written under this ticket."""
        return self._publishing[ticket].run.target.handoff

    # ---- the verbs of a handoff

    def run(self, target: Target, partition: int, now_s: float) -> bool:
        """A prefill for this target begins; False where it is under way or being given up."""
        if self.holds(target.handoff):
            return False
        self._runs[target.handoff] = _Run(
            target=target,
            partition=partition,
            lease_end_s=now_s + target.lease_s,
            grants=deque(target.grants),
            grants_seen={grant.number for grant in target.grants},
            num_left=target.num_blocks - target.num_blocks_held,
        )
        return True

    def finished(self, handoff: bytes, blocks: Iterable[tuple[int, int]]) -> tuple[PrefillAction, ...]:
        """KV of (number of the block, used block) is complete: in order, each once, cached blocks too."""
        run = self._runs.get(handoff)
        if run is None:
            return ()
        blocks = tuple(blocks)
        fresh = [(index, block) for index, block in blocks if index >= run.target.num_blocks_held]
        self._pool.retain(run.partition, [block for _, block in fresh])
        run.queue.extend(fresh)
        if run.num_left == 0 and any(index == run.target.num_blocks - 1 for index, _ in blocks):
            return self._announce(run)  # the prompt is complete, and nothing of it moves
        return self._publish()

    def credits(self, credits: Credits) -> tuple[PrefillAction, ...]:
        run = self._runs.get(credits.handoff)
        if run is None or run.target.epoch != credits.target_epoch:
            return ()
        fresh = [grant for grant in credits.grants if grant.number not in run.grants_seen]
        if len(run.grants_seen) + len(fresh) > run.target.num_blocks:
            return self._fail(run, Cause.CORRUPT)  # nobody grants more cells than blocks move
        run.grants_seen |= {grant.number for grant in fresh}
        run.grants.extend(fresh)
        return self._publish()

    def staged(self, ticket: int) -> tuple[PrefillAction, ...]:
        """The pages of a CopyIn were copied out."""
        piece = self._publishing[ticket]
        run = piece.run
        self._pool.release(run.partition, [block for _, block in piece.pieces])
        if run.is_aborted:
            return self._end(ticket)
        write = Write(ticket=ticket, partition=run.partition, cells=piece.cells, target=run.target, grants=piece.grants)
        return (write,)

    def written(self, ticket: int, checksums: tuple[int, ...]) -> tuple[PrefillAction, ...]:
        """A Write arrived; `checksums` are of the source cells as they were staged."""
        piece = self._publishing[ticket]
        return (*self._announce(piece.run, piece, checksums), *self._end(ticket))

    def write_failed(self, ticket: int, now_s: float) -> tuple[PrefillAction, ...]:
        """A Write failed or timed out, and may yet arrive: the handoff fails, the source cells go in quarantine."""
        piece = self._publishing.pop(ticket)
        run, handoff = piece.run, piece.run.target.handoff
        self._quarantine.add(handoff, self.epoch, run.partition, piece.cells, now_s)
        run.num_publishing -= 1
        run.is_tainted = True
        failed = () if run.is_aborted else self._fail(run, Cause.WRITE_FAILED)
        return (*failed, *self._drained(run))

    # ---- giving up

    def cancel(self, handoff: bytes, target_epoch: int) -> tuple[PrefillAction, ...]:
        """Give up. Answers Drained as soon as that is true, at once for a handoff it does not know."""
        run = self._runs.get(handoff)
        if run is not None:
            return self._abort(run)
        if handoff in self._aborted or self._quarantine.holds(handoff):
            return ()
        return (Drained(handoff=handoff, writer_epoch=self.epoch, target_epoch=target_epoch),)

    def expire(self, now_s: float) -> tuple[PrefillAction, ...]:
        self._quarantine.expire(now_s)
        overdue = [run for run in self._runs.values() if run.lease_end_s <= now_s]
        failed = itertools.chain.from_iterable(self._fail(run, Cause.LEASE) for run in overdue)
        return (*failed, *self._publish())

    # ---- decisions

    def _publish(self) -> tuple[PrefillAction, ...]:
        """Begins a piece for each handoff that has complete blocks, grants and free source cells now."""
        stages = [self._stage(run) for run in self._runs.values()]
        return tuple(stage for stage in stages if stage is not None)

    def _stage(self, run: _Run) -> CopyIn | None:
        num = min(len(run.queue), len(run.grants), self._slab.num_free(run.partition))
        cells = self._slab.lease(run.partition, num) if num else None
        if cells is None:
            return None
        pieces = tuple(run.queue.popleft() for _ in cells)
        grants = tuple(run.grants.popleft() for _ in cells)
        ticket = next(self._tickets)
        self._publishing[ticket] = _Publishing(run=run, pieces=pieces, cells=cells, grants=grants)
        run.num_publishing += 1
        pairs = tuple((block, cell) for (_, block), cell in zip(pieces, cells, strict=True))
        return CopyIn(ticket=ticket, partition=run.partition, pairs=pairs)

    def _announce(
        self, run: _Run, piece: _Publishing | None = None, checksums: tuple[int, ...] = ()
    ) -> tuple[Manifest, ...]:
        """The manifest of a piece that was written, or an empty one where nothing moves. The last one completes the
        prompt.
        """
        if run.is_aborted:
            return ()
        pieces, grants = (piece.pieces, piece.grants) if piece else ((), ())
        run.num_left -= len(pieces)
        if run.num_left == 0:
            del self._runs[run.target.handoff]
        manifest = Manifest(
            handoff=run.target.handoff,
            writer_epoch=self.epoch,
            target_epoch=run.target.epoch,
            blocks=tuple(index for index, _ in pieces),
            grants=grants,
            checksums=checksums,
            is_last=run.num_left == 0,
        )
        return (manifest,)

    def _end(self, ticket: int) -> tuple[PrefillAction, ...]:
        """A piece is over, and nothing reads its source cells any more."""
        piece = self._publishing.pop(ticket)
        self._slab.land(piece.run.partition, piece.cells)
        self._slab.release(piece.run.partition, piece.cells)
        piece.run.num_publishing -= 1
        return (*self._drained(piece.run), *self._publish())

    def _fail(self, run: _Run, cause: Cause) -> tuple[PrefillAction, ...]:
        return (Failed(handoff=run.target.handoff, epoch=self.epoch, cause=cause), *self._abort(run))

    def _abort(self, run: _Run) -> tuple[PrefillAction, ...]:
        """Begins nothing new for the handoff. What is being staged or written goes on to its end."""
        handoff = run.target.handoff
        del self._runs[handoff]
        self._aborted[handoff] = run
        run.is_aborted = True
        self._pool.release(run.partition, [block for _, block in run.queue])
        run.queue.clear()
        return (Stop(handoff=handoff), *self._drained(run))

    def _drained(self, run: _Run) -> tuple[Drained, ...]:
        """Forgets an aborted handoff once its last piece is over."""
        if not run.is_aborted or run.num_publishing:
            return ()
        self._aborted.pop(run.target.handoff, None)
        if run.is_tainted:
            return ()
        return (Drained(handoff=run.target.handoff, writer_epoch=self.epoch, target_epoch=run.target.epoch),)
