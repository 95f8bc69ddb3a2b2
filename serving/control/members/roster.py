"""Which workers have registered with a gateway, and for how long that counts.

A registration is a lease that its worker renews. Time is told in ticks, of which a lease has `LEASE_TICKS`: a gateway
that stood still counts one tick for all the time, and not every worker as gone. Of two processes that claim one address
only one can listen there, so whoever answers there has it: the later claim wins, as after a restart, unless the link
to that address is up and reaches another process. Bounded. Pure. How a worker that has registered is reached, and what
does not fit of it, is the link's and `fleet`'s.
"""

from dataclasses import dataclass

LEASE_TICKS = 8


@dataclass(slots=True)
class _Lease:
    epoch: int
    num_ticks: int = LEASE_TICKS  # left


@dataclass(frozen=True, slots=True)
class Taken:
    """Refused: another process answers at the address."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Full:
    """Refused: there are as many workers as there may be."""

    max_workers: int


class Roster:
    """The leases by address."""

    def __init__(self, max_workers: int) -> None:
        self._max_workers = max_workers
        self._leases: dict[str, _Lease] = {}

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(self._leases)

    def register(self, address: str, epoch: int, *, answering: int | None) -> Taken | Full | None:
        """A process claims the address. None: it has it from now on, and its lease is as new.

        `answering`: the epoch of the process that the link there reaches now; None: none.
        """
        holder = self._leases.get(address)
        if holder is None and len(self._leases) >= self._max_workers:
            return Full(self._max_workers)
        if holder is not None and answering not in (None, epoch):
            return Taken(answering)
        self._leases[address] = _Lease(epoch)
        return None

    def renew(self, address: str, epoch: int) -> bool:
        """False where the process has no lease there any more: it ended, or another process has it."""
        if not self._has(address, epoch):
            return False
        self._leases[address].num_ticks = LEASE_TICKS
        return True

    def leave(self, address: str, epoch: int) -> bool:
        """Ends the lease of a process; False where it has none there."""
        if not self._has(address, epoch):
            return False
        del self._leases[address]
        return True

    def tick(self) -> tuple[str, ...]:
        """A `LEASE_TICKS`th of a lease has passed. Returns the addresses whose leases have ended with it."""
        for lease in self._leases.values():
            lease.num_ticks -= 1
        ended = tuple(address for address, lease in self._leases.items() if lease.num_ticks <= 0)
        for address in ended:
            del self._leases[address]
        return ended

    def _has(self, address: str, epoch: int) -> bool:
        lease = self._leases.get(address)
        return lease is not None and lease.epoch == epoch
