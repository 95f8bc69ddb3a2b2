"""The workers that are there, whether they agree with one another, and which of them takes a leg of a request.

Workers must serve the same checkpoint in the same dtype and blocks: otherwise a request's tokens would depend on where
it ran, and its KV could not move. The first to be there sets the measure. One that drains stays, but gets nothing new.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from moonshard.kv.prefix import Spaces
from moonshard.serving.control.routing.router import Home

PREFILL_ROLES = frozenset({"prefill"})
DECODE_ROLES = frozenset({"both", "decode"})
_AGREED = ("fingerprint", "dtype", "vocab_size", "block_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLimits:
    """What the workers agree on, and the least of what each can hold."""

    fingerprint: str
    dtype: str
    vocab_size: int
    block_size: int
    max_context_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A worker's process, as it says itself when it comes. `role` may be none of ours: then it is a misfit."""

    address: str
    epoch: int
    role: str
    num_partitions: int
    fingerprint: str
    dtype: str
    vocab_size: int
    block_size: int
    max_context_tokens: int
    num_processes: int = 1  # that have tiers of their own

    @property
    def spaces(self) -> Spaces:
        return Spaces(self.num_partitions, self.num_processes)

    @property
    def homes(self) -> tuple[Home, ...]:
        """One for each of its partitions."""
        return tuple(Home(self.address, partition) for partition in range(self.num_partitions))


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberLoad:
    """What a worker reported last, as far as routing needs it."""

    is_draining: bool = False
    queued_tokens: Sequence[int] = ()  # to be prefilled, by partition; empty before the first report
    num_running: int = 0  # sequences


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why a worker cannot join the fleet."""

    field: str
    message: str


class Fleet:
    """Changed by `join`, `leave` and `report`; what each request asks is kept ready from one change to the next.

    `addresses` are where workers may be, in the order in which they stand among equals.
    """

    def __init__(self, addresses: Iterable[str]) -> None:
        self._order = {address: number for number, address in enumerate(addresses)}
        self._next_place = len(self._order)
        self.limits: ModelLimits | None = None  # while no worker is there
        self._members: dict[str, Member] = {}  # by address
        self._loads: dict[str, MemberLoad] = {}  # likewise
        self._by_epoch: dict[int, Member] = {}
        self._routable: Mapping[str, Member] = {}  # by address: those that do not drain
        self._homes: dict[frozenset[str], tuple[Home, ...]] = {}

    @property
    def is_ready(self) -> bool:
        """Whether requests can be served: a worker that decodes can prefill too."""
        return any(member.role in DECODE_ROLES for member in self._routable.values())

    @property
    def has_prefill(self) -> bool:
        return any(member.role in PREFILL_ROLES for member in self._routable.values())

    @property
    def is_complete(self) -> bool:
        """Whether each leg of a request has a worker that is meant for it."""
        roles = {member.role for member in self._routable.values()}
        return "both" in roles or roles >= {"prefill", "decode"}

    @property
    def block_size(self) -> int:
        """The block size of the workers that are there; 1 where there is none."""
        return 1 if self.limits is None else self.limits.block_size

    def expect(self, address: str) -> None:
        """A worker may come there too; it stands behind those that were expected before."""
        if address not in self._order:
            self._order[address] = self._next_place
            self._next_place += 1

    def forget(self, address: str) -> None:
        """No worker will come there. None is there."""
        self._order.pop(address, None)

    def misfit(self, member: Member) -> Misfit | None:
        """Why a worker may not join; None where it may. One process at two addresses would be two workers to requests,
        but one to a handoff.
        """
        if member.role not in PREFILL_ROLES | DECODE_ROLES:
            return Misfit("role", f"not routed to, role {member.role!r} is none")
        if self.limits is None:
            return None
        for name in _AGREED:
            found, wanted = getattr(member, name), getattr(self.limits, name)
            if found != wanted:
                return Misfit(name, f"not routed to, {name} is {found!r} where the other workers have {wanted!r}")
        double = self._by_epoch.get(member.epoch)
        if double is not None and double.address != member.address:
            return Misfit("epoch", f"not routed to, the same process as at {double.address}")
        return None

    def join(self, member: Member) -> None:
        """A worker that fits has come."""
        self._members[member.address] = self._by_epoch[member.epoch] = member
        self._loads[member.address] = MemberLoad()
        self._change()

    def leave(self, address: str) -> None:
        """KeyError where none is there."""
        del self._by_epoch[self._members.pop(address).epoch]
        del self._loads[address]
        self._change()

    def report(self, address: str, load: MemberLoad) -> bool:
        """Takes a worker's report, which comes with each of its messages. Says whether it has become routable, or has
        ceased to be.
        """
        was_draining = self._loads[address].is_draining
        self._loads[address] = load
        if load.is_draining is was_draining:
            return False
        self._change()
        return True

    def member_at(self, address: str) -> Member:
        """KeyError where none is there."""
        return self._members[address]

    def load_at(self, address: str) -> MemberLoad:
        """KeyError where none is there."""
        return self._loads[address]

    def homes(self, roles: frozenset[str], *, exclude: Collection[int] = ()) -> tuple[Home, ...]:
        """The homes of workers of these roles that can be routed to, without the workers of the epochs in `exclude`.

        The very same tuple is returned as long as its homes are the same: the router looks up a tuple's numbers only
        once.
        """
        if exclude:
            return _homes_of(m for m in self._routable.values() if m.role in roles and m.epoch not in exclude)
        if roles not in self._homes:
            self._homes[roles] = _homes_of(m for m in self._routable.values() if m.role in roles)
        return self._homes[roles]

    def _change(self) -> None:
        members = sorted(self._members.values(), key=lambda member: self._order[member.address])
        self.limits = _limits_of(members)
        self._routable = {member.address: member for member in members if not self._loads[member.address].is_draining}
        self._homes.clear()


def _homes_of(members: Iterable[Member]) -> tuple[Home, ...]:
    return tuple(home for member in members for home in member.homes)


def _limits_of(members: Sequence[Member]) -> ModelLimits | None:
    if not members:
        return None
    return ModelLimits(
        **{name: getattr(members[0], name) for name in _AGREED},
        max_context_tokens=min(member.max_context_tokens for member in members),
    )
