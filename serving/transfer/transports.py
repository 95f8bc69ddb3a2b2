"""Which transport a worker's KV plane runs on, and how it is started: the one place that makes them.

`config.keys` has their names; `config.faults` and `commands.checks.ports` ask whether it is Mooncake.
Made before the process's server, which carries the gRPC stream where that is the transport; opened once the model is
loaded, since only then the size of a block is known.
"""

from typing import TYPE_CHECKING, assert_never

import grpc

from moonshard.kv.listening import listening_ports
from moonshard.kv.slab import Slab, SlabTooLarge
from moonshard.kv.slab_shards import num_held_bytes
from moonshard.kv.transfer import Transport
from moonshard.rpc.addresses import host_port
from moonshard.serving.config.keys import Config, ConfigError, WorkerRole, kv_host_of, processes_of
from moonshard.serving.config.kv_ports import library_ports
from moonshard.serving.config.tls import link_credentials
from moonshard.serving.engine.capacity.memory import free_memory_bytes
from moonshard.serving.transfer.grpc_stream import GrpcTransport, KvStreamReceiver

if TYPE_CHECKING:
    from moonshard.serving.engine.loading.model import LoadedModel
    from moonshard.serving.transfer.plane import KvPlane


def openness(config: Config, role: WorkerRole, port: int = 0) -> dict[str, object]:
    """The ports besides a process's own that are open without the cluster's key, in words for the ready message.

    `port`: its own, 0 where it has none.
    """
    opened = {
        "Mooncake": role != "both" and config.kv.transport == "mooncake",
        "the gang's collectives": processes_of(config, role) > 1,
    }
    whose = " and ".join(name for name, is_open in opened.items() if is_open)
    ports = ", ".join(map(str, sorted(listening_ports() - {port}))) if whose else ""
    return {"message": f"ready; open to whoever reaches them are the ports of {whose}: {ports}"} if ports else {}


class KvTransports:
    """The transports of one worker. With `key` the workers of its cluster prove themselves."""

    def __init__(self, config: Config, key: bytes):
        self._config = config
        self._key = key
        self._receiver = KvStreamReceiver() if config.kv.transport == "grpc" else None

    @property
    def needs_server(self) -> bool:
        """Whether peers write through a server of this process, see `add_to`."""
        return self._receiver is not None

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds to the process's own server what the transport needs there."""
        if self._receiver is not None:
            self._receiver.add_to(server)

    def open_plane(self, model: "LoadedModel", port: int = 0) -> "KvPlane":
        """Allocate the slab and start the transport. This blocks, for longest where Mooncake's ports are still at rest.

        Of a gang each member has a slab with its own parts of as many blocks. `port`: of the process's server, 0 where
        it has none.

        Raises:
            ConfigError: the slab has not one cell per partition, or the machine has not that much memory left.
            TransportUnavailable: it cannot be loaded, or does not start.
        """
        from moonshard.serving.transfer.plane import KvPlane  # with jax, which is not waited for where a server starts

        num_partitions, block_bytes = model.pool.num_partitions, model.block_bytes
        num_cells = self._config.kv.slab_bytes // (block_bytes * num_partitions)
        if num_cells == 0:
            raise ConfigError(
                [
                    f"kv.slab_bytes: {self._config.kv.slab_bytes} bytes are less than a block of {block_bytes} bytes "
                    f"for each of {num_partitions} partitions"
                ]
            )
        try:
            held_bytes = sum(num_held_bytes(model.layout.groups[0], owners) for owners in model.held)
            slab = Slab(num_cells, max(1, held_bytes), available_bytes=free_memory_bytes())
        except SlabTooLarge as error:
            raise ConfigError([f"kv.slab_bytes: {error}"]) from error
        return KvPlane(
            self._start(port),
            slab,
            name=self._config.kv.transport,
            layout=model.layout,
            fingerprint=model.fingerprint,
            num_partitions=num_partitions,
            held=model.held,
            num_cells=num_cells,
        )

    def _start(self, port: int) -> Transport:
        kv, host = self._config.kv, kv_host_of(self._config)
        match kv.transport:
            case "grpc":
                assert self._receiver is not None  # made with this object
                return GrpcTransport(
                    self._receiver,
                    host_port(host, port),
                    key=self._key,
                    timeout_s=kv.transfer_timeout_s,
                    credentials=link_credentials(self._config),
                )
            case "mooncake":
                from moonshard.kv.mooncake import MooncakeConfig, MooncakeTransport

                config = MooncakeConfig(timeout_s=kv.transfer_timeout_s, ports=library_ports(self._config))
                return MooncakeTransport.start(host, config=config)
            case unknown:
                assert_never(unknown)
