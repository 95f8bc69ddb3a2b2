"""Where a deployment's processes look for one another, where the configuration does not say."""

from moonshard.rpc.addresses import host_port
from moonshard.serving.config.keys import Config, port_of, roles_of


def default_worker_addresses(config: Config) -> tuple[str, ...]:
    """Where a gateway looks for workers that nobody has named: one of each role, at `worker.host`."""
    return tuple(host_port(config.worker.host, port_of(config, role)) for role in roles_of(config))
