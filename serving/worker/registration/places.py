"""Where the registries of gateways are: the addresses behind the names of `worker.gateways`, as of now."""

import asyncio
import socket
from dataclasses import dataclass

from moonshard.rpc.addresses import host_port


@dataclass(frozen=True, slots=True)
class Place:
    """One gateway's registry. `name` is what its certificate is for, where there is TLS."""

    host: str  # an IP address
    port: int
    name: str

    @property
    def address(self) -> str:
        return host_port(self.host, self.port)


async def resolve(gateway: str) -> frozenset[Place]:
    """All addresses of `host:port`; of an IP address, that one. OSError where there are none."""
    host, _, port = gateway.rpartition(":")
    name = host.removeprefix("[").removesuffix("]")
    found = await asyncio.get_running_loop().getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
    return frozenset(Place(str(address[0]), int(port), name) for *_, address in found)
