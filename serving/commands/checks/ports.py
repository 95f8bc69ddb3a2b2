"""Whether ports are free, asked before anything is loaded. The bind comes later and may yet fail."""

import errno
import socket
from collections.abc import Mapping

from moonshard.serving.config.keys import Config, ConfigError, WorkerRole, port_key, port_of
from moonshard.serving.config.kv_ports import too_few_ports


def check_ports_are_free(config: Config) -> None:
    """ConfigError for a port of the gateway's that another process listens on."""
    gateway = config.gateway
    _check(gateway.host, {"gateway.port": gateway.port, "gateway.grpc_port": gateway.grpc_port})
    if gateway.registry == "grpc":
        _check(gateway.registry_host, {"gateway.registry_port": gateway.registry_port})


def check_worker_port_is_free(config: Config, role: WorkerRole, *, listens: bool = True) -> None:
    """The same for that of a worker; of a process that does not listen there, whether it is at its host at all.

    gRPC would say it in three lines of its own, and a gang's collectives in words of theirs.
    """
    own = {port_key(role): port_of(config, role)} if listens else {"worker.host": 0}
    _check(config.worker.host, own)


def check_kv_ports_suffice(config: Config, *, num_processes: int) -> None:
    """ConfigError where Mooncake finds too few on one machine: the last worker would fail once all have compiled."""
    if (fault := too_few_ports(config, num_processes)) is not None:
        raise ConfigError([fault])


def _check(host: str, ports: Mapping[str, int]) -> None:
    faults = [f"{key}: {fault}" for key, port in ports.items() if (fault := _bind_fault(host, port, key))]
    if faults:
        raise ConfigError(faults)


def _bind_fault(host: str, port: int, key: str) -> str | None:
    """Why nothing can listen there. A port that is merely in TIME_WAIT is free."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        hint = f"; --set {key}=0 takes any free port" if error.errno == errno.EADDRINUSE else ""
        return f"cannot listen on {host}:{port}: {error.strerror}{hint}"
    return None
