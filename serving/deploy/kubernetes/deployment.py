"""A deployment as its manifests see it: what the command line says of it, and the names that follow from that."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from moonshard.rpc.addresses import host_port
from moonshard.serving.config.keys import Config, WorkerRole, command_of, port_of, roles_of

GATEWAY, REGISTRY = "gateway", "registry"
PART_OF = "moonshard"
MAX_NAME = 40  # characters; a pod's name adds a role and two numbers, and has at most 63

type Manifest = dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Volume:
    """A PersistentVolumeClaim and the folder where pods have it."""

    path: PurePosixPath
    claim: str

    def has(self, path: Path) -> bool:
        return PurePosixPath(path).is_relative_to(self.path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """One deployment in one namespace. `config` is the file's; its paths of Secrets are of this machine."""

    config: Config
    image: str
    name: str = PART_OF  # the beginning of every object's
    namespace: str = "default"
    num_gateways: int = 1
    volumes: Sequence[Volume] = ()
    device: str | None = None  # the extended resource of which a worker takes one for each device of its mesh

    @property
    def components(self) -> tuple[str, ...]:
        return (GATEWAY, *map(command_of, roles_of(self.config)))

    def named(self, component: str) -> str:
        """The name of an object, or of several of different kinds."""
        return f"{self.name}-{component}"

    def labels(self, component: str | None = None) -> dict[str, str]:
        """Of the objects of a component; without one what all of them have."""
        labels = {"app.kubernetes.io/name": PART_OF, "app.kubernetes.io/instance": self.name}
        return labels if component is None else labels | {"app.kubernetes.io/component": component}

    def metadata(self, name: str, component: str | None = None) -> Manifest:
        """`component`: None for what belongs to several."""
        return {"name": name, "namespace": self.namespace, "labels": self.labels(component)}

    def num_workers(self, role: WorkerRole) -> int:
        return self.config.prefill.replicas if role == "prefill" else self.config.decode.replicas

    def domain(self, role: WorkerRole) -> str:
        """Under which every worker of the role has its name."""
        return self._service_host(command_of(role))

    @property
    def has_registry(self) -> bool:
        """Whether workers register; else gateways are told of them."""
        return self.config.gateway.registry == "grpc"

    @property
    def registries(self) -> tuple[str, ...]:
        """host:port of what workers register with: one name for all gateways. Empty where there are none."""
        registry = host_port(self._service_host(REGISTRY), self.config.gateway.registry_port)
        return (registry,) if self.has_registry else ()

    @property
    def certificate_names(self) -> tuple[str, ...]:
        """What the certificate of [tls] must be good for: the names by which the pods call one another."""
        registry = (self._service_host(REGISTRY),) if self.has_registry else ()
        return (*(f"*.{self.domain(role)}" for role in roles_of(self.config)), *registry)

    @property
    def worker_addresses(self) -> tuple[str, ...]:
        """host:port of each worker that gateways are told of: of a gang, of the pod that leads it."""
        if self.has_registry:
            return ()
        return tuple(
            host_port(f"{self.named(command_of(role))}-{index}.{self.domain(role)}", port_of(self.config, role))
            for role in roles_of(self.config)
            for index in range(self.num_workers(role))
        )

    def _service_host(self, component: str) -> str:
        """Resolvers add the cluster's domain."""
        return f"{self.named(component)}.{self.namespace}.svc"
