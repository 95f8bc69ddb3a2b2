"""`moonshard worker`."""

from moonshard.serving.commands.options import Configured, StatusFd
from moonshard.serving.commands.roles import start_worker


def worker(options: Configured, status_fd: StatusFd = None) -> int:
    """Run only one worker of mode = "aggregated", at worker.host and worker.port: the model, for prefill and decode."""
    return start_worker(options, "both", status_fd)
