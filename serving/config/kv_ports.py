"""Who listens where of `kv.ports` on one machine.

The first ones are those of Mooncake Store, at which its processes are told to listen: its client, its master and the
master's metrics. Among the others Mooncake's library chooses by itself, in workers and in the store's client; so that
none of them is ever at a port of the store's, also while that is being restarted.
"""

from collections.abc import Sequence

from moonshard.serving.config.keys import Config

PORTS_OF_LIBRARY = 2  # in each process: one for its handshake, one for the data


def workers_have_mooncake(config: Config) -> bool:
    """Whether each worker listens for Mooncake's transport."""
    return config.mode == "disaggregated" and config.kv.transport == "mooncake"


def store_ports(config: Config) -> Sequence[int]:
    """The store's of `kv.ports`: its client's, and unless the master is somebody else's that and its metrics. Empty
    where there is no store, and where all ports are open to choice or the client is somebody else's, at another port.
    """
    ports, store = config.kv.ports, config.kv.store
    if ports is None or not store.is_shared or is_client_elsewhere(config):
        return ()
    return range(ports[0], ports[0] + (3 if store.master is None else 1))


def library_ports(config: Config) -> tuple[int, int] | None:
    """First and last of those that the library chooses among; None: it chooses among all."""
    ports = config.kv.ports
    return None if ports is None else (ports[0] + len(store_ports(config)), ports[1])


def is_client_elsewhere(config: Config) -> bool:
    """Whether somebody else runs the store's client, at a port that is none of `kv.ports`."""
    ports, store = config.kv.ports, config.kv.store
    if ports is None or store.client is None or store.dram_bytes:
        return False
    return not ports[0] <= _port_of(store.client) <= ports[1]


def too_few_ports(config: Config, num_processes: int = 1) -> str | None:
    """What is wrong with `kv.ports`, for so many workers' processes on this machine, and the store, if it has one."""
    if config.kv.ports is None:
        return None
    first, last = config.kv.ports
    num_named = len(store_ports(config))
    num_ports = {"the store": num_named + PORTS_OF_LIBRARY if num_named else 0}
    if workers_have_mooncake(config):
        who = "a worker" if num_processes == 1 else f"{num_processes} processes of workers"
        num_ports[who] = num_processes * PORTS_OF_LIBRARY
    needed, given = sum(num_ports.values()), last - first + 1
    if given >= needed:
        return None
    who = " and ".join(name for name, number in num_ports.items() if number)
    return f"kv.ports: {needed} are needed for {who}, {first} to {last} are {max(given, 0)}"


def store_port_fault(config: Config) -> str | None:
    """Whether the store's client would listen where no fence of `kv.ports` is, or where the library may."""
    ports, client = config.kv.ports, config.kv.store.client
    if ports is None or client is None or not config.kv.store.is_shared or is_client_elsewhere(config):
        return None
    if _port_of(client) == ports[0]:
        return None
    return f"kv.store.client: of kv.ports, {ports[0]} to {ports[1]}, the first is its port, not {_port_of(client)}"


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])
