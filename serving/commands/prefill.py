"""`moonshard prefill`."""

from moonshard.serving.commands.options import Configured, StatusFd
from moonshard.serving.commands.roles import start_worker


def prefill(options: Configured, status_fd: StatusFd = None) -> int:
    """Run only one prefill worker, at worker.host and prefill.port: it hands its KV over to decode workers."""
    return start_worker(options, "prefill", status_fd)
