"""What the two sides of a handoff and the gateway between them say, and what they ask their processes to do.

A handoff moves one request's KV from the worker that prefills it to the one that decodes it: reserve, publish, land,
start. Every identity is complete in itself: a handoff is 128 random bits, an epoch is drawn when a process starts, and
a slab cell is named together with the number of its grant, so that a message that comes late, twice or from a former
process is told by what it says. Times are durations. The tokens of decode are no part of it: the stream keeps their
order.
"""

import enum
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol

from moonshard.serving.control.request import Request
from moonshard.sharding.layout import Tile


class Cause(enum.Enum):
    """Why a handoff failed."""

    OVERLOADED = "the decode side has no room"
    CORRUPT = "what arrived is not what its checksums say"
    WRITE_FAILED = "a write failed or timed out"
    LEASE = "the reservation's lease ended"
    PREFILL_GONE = "the prefill process is gone"
    DECODE_GONE = "the decode process is gone"
    CANCELLED = "the client left"


@dataclass(frozen=True, slots=True)
class Grant:
    """Leave to write once into a cell of the decode side's slab. Numbers never repeat within its epoch."""

    cell: int
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserve:
    """Gateway to D, with the request itself. D counts the lease from its Target, the gateway from this."""

    handoff: bytes
    writer_epoch: int  # of the prefill process that will write
    lease_s: float  # by then decode has been started


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """D to gateway, and on to P in Run. The prompt's `num_blocks` are those that decode needs, numbered as
    `BlockGroups.seen` orders them; the first `num_blocks_held` need not be sent.
    """

    handoff: bytes
    epoch: int
    writer_epoch: int
    session: str
    partition: int
    num_blocks: int
    num_blocks_held: int
    grants: tuple[Grant, ...]
    lease_s: float


class TargetHeader(Protocol):
    """What the gateway reads of a Target, which goes on to P as it came."""

    @property
    def handoff(self) -> bytes: ...
    @property
    def epoch(self) -> int: ...
    @property
    def writer_epoch(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Gateway to P, with the request itself."""

    target: TargetHeader


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """P to gateway (Chunk) and on to D (Landed): these blocks of the prompt were written into these cells.

    `blocks` and `grants` are parallel; blocks are numbered as in the Target. Checksums are of the bytes as P staged
    them: of each cell one, or with `pieces` one of each piece of a block. Only the last manifest of a prompt that D
    holds already names none.
    """

    handoff: bytes
    writer_epoch: int
    target_epoch: int
    blocks: tuple[int, ...]
    grants: tuple[Grant, ...]
    checksums: tuple[int, ...]
    is_last: bool
    pieces: tuple[Tile, ...] = ()


class ManifestHeader(Protocol):
    """What the gateway reads of a Manifest, which goes on to D as it came."""

    @property
    def handoff(self) -> bytes: ...
    @property
    def writer_epoch(self) -> int: ...
    @property
    def target_epoch(self) -> int: ...
    @property
    def is_last(self) -> bool: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Credits:
    """D to gateway and on to P: further cells to write into."""

    handoff: bytes
    target_epoch: int
    grants: tuple[Grant, ...]


class CreditsHeader(Protocol):
    """What the gateway reads of Credits, which go on to P as they came."""

    @property
    def handoff(self) -> bytes: ...


def guesses_of(outputs: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """What was guessed behind each first token; none at all where nobody guessed."""
    guesses = tuple(outputs)
    return guesses if any(guesses) else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstTokens:
    """P to gateway: the first token of each choice; `is_finished` where they end the request."""

    handoff: bytes
    writer_epoch: int
    target_epoch: int
    tokens: tuple[int, ...]
    is_finished: bool = False
    guesses: tuple[tuple[int, ...], ...] = ()  # a draft model's, behind each of them, as `guesses_of` has it


@dataclass(frozen=True, kw_only=True, slots=True)
class Start[Last: ManifestHeader]:
    """Gateway to D: everything was published, decode from here. `last` is a Manifest for D."""

    handoff: bytes
    tokens: tuple[int, ...]
    last: Last
    guesses: tuple[tuple[int, ...], ...] = ()  # likewise


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancel:
    """Gateway to either side: give up. `target_epoch` is where P's Drained must go."""

    handoff: bytes
    target_epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Drained:
    """P to gateway and on to D: no write of this handoff is under way, and none will begin."""

    handoff: bytes
    writer_epoch: int
    target_epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """Either side to gateway: it gave up, or had no room to begin, and holds nothing for this handoff but what is in
    quarantine.
    """

    handoff: bytes
    epoch: int  # the sender's
    cause: Cause
    retry_after_s: float = 0.0  # of one without room: when there may be some


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """D to gateway: the request's last token was sent. On the wire its last output says so."""

    handoff: bytes
    epoch: int


# ---- what a side asks of its own process


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyIn:
    """P: copy pages into source cells, (block, cell) each, on the device thread; answer with `staged(ticket)`."""

    ticket: int
    partition: int
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """P: send source cells into granted cells, pairwise; answer with `written` or `write_failed`."""

    ticket: int
    partition: int
    cells: tuple[int, ...]
    target: Target
    grants: tuple[Grant, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """P: stop prefilling this handoff's request, if it still runs."""

    handoff: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyOut:
    """D: copy these cells out, compare the copy with the checksums, answer with `verified(ticket, ...)`."""

    ticket: int
    partition: int
    cells: tuple[int, ...]
    checksums: tuple[int, ...]
    pieces: tuple[Tile, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Land:
    """D: scatter the copy of `ticket` into these blocks, in launch order before anything that is decided later."""

    ticket: int
    partition: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Join:
    """D: decode. The blocks go over to the scheduler with one reference each; it says `left` in the end."""

    handoff: bytes
    request: Request
    partition: int
    block_table: tuple[int, ...]
    tokens: tuple[int, ...]
    guesses: tuple[tuple[int, ...], ...]
    started_s: float  # when Start came


@dataclass(frozen=True, slots=True)
class Tell[Owner: Hashable, Message]:
    """Either side: send the gateway that owns the handoff a message. After Failed the handoff is gone."""

    owner: Owner
    message: Message


type ToPrefill = Run | CreditsHeader | Cancel
type ToDecode = Reserve | ManifestHeader | Start[ManifestHeader] | Cancel | Drained
type FromPrefill = Manifest | FirstTokens | Drained | Failed
type FromDecode = Target | Credits | Failed | Finished
type PrefillAction = FromPrefill | CopyIn | Write | Stop
type DecodeAction = Credits | Failed | CopyOut | Land | Join
