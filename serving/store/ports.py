"""Where the store's processes answer."""

import contextlib
import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from moonshard.serving.config.loopback import LOOPBACK

FREE_PORTS = range(20_000, 32_000)  # outside Linux's default range for outgoing calls: one could come to itself there
NUM_PORTS_TRIED = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class StorePorts:
    """Where the two processes answer: the master on loopback."""

    master: int
    metrics: int  # the master's, by HTTP
    client: int  # also names the socket by which the client takes workers' memory
    client_host: str = LOOPBACK  # an address of this machine; other machines' clients reach it there

    @classmethod
    def free(cls) -> "StorePorts":
        """Ports that nothing listens on now."""
        master, metrics, client = free_ports(3)
        return cls(master=master, metrics=metrics, client=client)

    @property
    def client_address(self) -> str:
        return f"{self.client_host}:{self.client}"

    @property
    def master_address(self) -> str:
        return f"{LOOPBACK}:{self.master}"


def free_ports(num_ports: int, *, among: Sequence[int] = FREE_PORTS, but: int | None = None) -> list[int]:
    """Different ports that nothing listens on now, on loopback. OSError where so many are not found."""
    found = list[int]()
    for port in random.sample(among, min(NUM_PORTS_TRIED, len(among))):
        with contextlib.suppress(OSError), socket.create_server((LOOPBACK, port)):
            found += [port] if port != but else []
        if len(found) == num_ports:
            return found
    raise OSError(f"no {num_ports} free ports from {among[0]} to {among[-1]}")
