"""`moonshard worker`."""

from moonshard.serving.commands.options import Configured, StatusFd
from moonshard.serving.commands.ports import check_worker_port_is_free
from moonshard.serving.config import Config, ConfigError
from moonshard.serving.startup import RunProcess, prepare_jax, run_process
from moonshard.serving.status_pipe import Status


def worker(options: Configured, status_fd: StatusFd = None) -> int:
    """Run only one worker, at worker.host and worker.port: the model, and nothing a client talks to."""
    config = options.load()
    check_worker_port_is_free(config)  # gRPC would say it in three lines of its own
    prepare_jax(config.decode.mesh)
    return run_process(_load, config, status_fd)


def _load() -> RunProcess:
    from moonshard.rpc.server import PortInUse
    from moonshard.serving.worker_process import run_worker

    async def run(config: Config, *, status: Status) -> int:
        try:
            return await run_worker(config, status=status)
        except PortInUse as error:
            raise ConfigError([f"worker.port: {error}"]) from error

    return run
