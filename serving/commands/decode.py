"""`moonshard decode`."""

from moonshard.serving.commands.options import Configured, StatusFd
from moonshard.serving.commands.roles import start_worker


def decode(options: Configured, status_fd: StatusFd = None) -> int:
    """Run only one decode worker, at worker.host and decode.port: it goes on from the KV of prefill workers."""
    return start_worker(options, "decode", status_fd)
