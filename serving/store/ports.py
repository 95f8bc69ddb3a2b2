"""Where the store's processes answer."""

import contextlib
import random
import socket
from dataclasses import dataclass

from moonshard.kv.store.mooncake.answers import client_socket
from moonshard.serving.config.loopback import LOOPBACK

FREE_PORTS = range(20_000, 32_000)  # outside Linux's default range for outgoing calls: one could come to itself there
NUM_PORTS_TRIED = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class StorePorts:
    """Where the two processes answer: the master on loopback."""

    master: int
    metrics: int  # the master's, by HTTP
    client: int  # also names the socket
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

    @property
    def client_socket(self) -> str:
        """The name in the abstract namespace of the socket by which the client takes workers' memory."""
        return client_socket(self.client)


def free_ports(num_ports: int, *, but: int | None = None) -> list[int]:
    """Different ports that nothing listens on now, on loopback. OSError where so many are not found."""
    found = list[int]()
    for port in random.sample(FREE_PORTS, NUM_PORTS_TRIED):
        with contextlib.suppress(OSError), socket.create_server((LOOPBACK, port)):
            found += [port] if port != but else []
        if len(found) == num_ports:
            return found
    raise OSError(f"no {num_ports} free ports from {FREE_PORTS[0]} to {FREE_PORTS[-1]}")
