"""How long the processes of a deployment may take to end, by its configuration."""

from moonshard.serving.config.keys import Config
from moonshard.serving.deploy.children.role import RestartLimits


def limits_of(config: Config) -> RestartLimits:
    """Patience with a drain: the gateway's own, some seconds for the workers, then SIGKILL."""
    drain_s = config.gateway.drain_timeout_s
    return RestartLimits(gateway_drain_s=drain_s + 4, drain_s=drain_s + 7)
