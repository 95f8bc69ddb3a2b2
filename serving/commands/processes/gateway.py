"""`moonshard gateway`."""

from moonshard.serving.commands.checks.ports import check_ports_are_free
from moonshard.serving.commands.options import Configured, OrdersFd, StatusFd
from moonshard.serving.config.keys import Config, ConfigError
from moonshard.serving.deploy.startup import ProcessStart, RunProcess, run_process
from moonshard.serving.deploy.status_pipe import Status
from moonshard.serving.deploy.timings import Timings


def gateway(options: Configured, orders_fd: OrdersFd = None, status_fd: StatusFd = None) -> int:
    """Run only the gateway: OpenAI's HTTP API and gRPC in front of the workers at gateway.workers."""
    timings = Timings()
    timings.note("interpreter", 0.0)
    with timings.phase("configuration"):
        config = options.load()
        check_ports_are_free(config)
    return run_process(lambda: _load(orders_fd), config, status_fd, ProcessStart(timings=timings))


def _load(orders_fd: int | None) -> RunProcess:
    from moonshard.rpc.server.server import PortInUse
    from moonshard.serving.gateway.process import run_gateway

    async def run(config: Config, *, status: Status, start: ProcessStart) -> int:
        try:
            return await run_gateway(config, status=status, start=start, orders_fd=orders_fd)
        except PortInUse as error:
            key = "gateway.grpc_port" if error.port == config.gateway.grpc_port else "gateway.port"
            raise ConfigError([f"{key}: {error}"]) from error

    return run
