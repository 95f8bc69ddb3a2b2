"""What the loop's gateway and workers say besides a handoff's own messages; each stands for one on the Link."""

from collections.abc import Mapping
from dataclasses import dataclass

from moonshard.kv.prefix import BlockName, PrefixEvent
from moonshard.serving.control.batching.queue import Rejected
from moonshard.serving.control.handoff import messages as m
from moonshard.serving.control.members.fleet import Member
from moonshard.serving.control.request import Output, Request

# ---- gateway to workers


@dataclass(frozen=True, slots=True)
class Submit:
    """Prefill and decode on one worker; `resumed`: only these choices, after these tokens."""

    request: Request
    partition: int
    resumed: Mapping[int, tuple[int, ...]] | None


@dataclass(frozen=True, slots=True)
class Leg:
    """Reserve or Run, together with the request."""

    message: m.Reserve | m.Run
    request: Request
    partition: int


@dataclass(frozen=True, slots=True)
class End:
    """The end of a request that was submitted, or has joined."""

    request_id: bytes


type ToWorker = Submit | Leg | End | m.Manifest | m.Start[m.Manifest] | m.Credits | m.Cancel | m.Drained

# ---- workers to the gateway


@dataclass(frozen=True, slots=True)
class Welcome:
    member: Member
    known: tuple[tuple[BlockName, ...], ...]  # by partition
    next_number: int


@dataclass(frozen=True, slots=True)
class Step:
    outputs: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """By partition: tokens to be prefilled, and with these all that are held or to come. `num_seen`: Submit and Leg."""

    num_seen: int
    queued_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    num_running: int


@dataclass(frozen=True, slots=True)
class News:
    """Prefixes that a worker has gained or lost."""

    events: tuple[PrefixEvent, ...]


@dataclass(frozen=True, slots=True)
class TurnedDown:
    """The last message about a request."""

    request_id: bytes
    error: Rejected


type FromWorker = Welcome | Step | Report | News | TurnedDown | m.FromPrefill | m.FromDecode
