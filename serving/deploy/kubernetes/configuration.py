"""The configuration as pods have it: one file for all of them, and what each worker is told beside it.

Of the file that `moonshard serve` reads the addresses change, and the paths of what comes from Secrets; whatever has
its default is left out. A worker listens at its pod's own address, which no file can name: so it has a name of its own
in recordings and spans, and KV comes to it by that address, which no resolver remembers from the pod before it; so does
the gateway with which it registers. KV that goes over gRPC goes to the pod's name, and so does a gateway that asks for
a certificate, since that is what one can have. Where to register only workers are told: of a process that listens on
loopback, as by the file all do, that would be a fault.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from moonshard.serving.config.faults import has_kv_stream
from moonshard.serving.config.keys import (
    EMBEDDED_MODEL_NAME,
    Config,
    ModelConfig,
    TlsConfig,
    WorkerRole,
    embedded_model_path,
)
from moonshard.serving.config.loopback import is_loopback
from moonshard.serving.config.reading import leaves, toml_value
from moonshard.serving.deploy.kubernetes.deployment import Deployment

ETC = Path("/etc/moonshard")
FOLDER, FILE = ETC / "config", "moonshard.toml"
TLS_FOLDER, TENANTS_FOLDER, CLUSTER_FOLDER = ETC / "tls", ETC / "tenants", ETC / "cluster"
CERT, TLS_KEY, CA = "tls.crt", "tls.key", "ca.crt"  # as kubernetes.io/tls and cert-manager name them
TENANTS = "keys.toml"
CLUSTER_KEY = "cluster.key"
RUN = Path("/run/moonshard")  # in memory: where a pod has its own copy of the cluster's key
EVERYWHERE = "0.0.0.0"

# Kubernetes puts a variable of the container in their place (in commands and arguments, and nowhere else).
POD_IP, POD_NAME = "$(POD_IP)", "$(POD_NAME)"


def file_of(deployment: Deployment) -> str:
    """The TOML that all pods have: a line for every key that has not its default."""
    return "".join(f"{key} = {toml_value(value)}\n" for key, value in _changed(pods_config(deployment)))


def pods_config(deployment: Deployment) -> Config:
    """What the file says."""
    config = deployment.config
    has_tls = config.tls.is_complete
    tls = TlsConfig(cert=TLS_FOLDER / CERT, key=TLS_FOLDER / TLS_KEY, ca=TLS_FOLDER / CA) if has_tls else config.tls
    registry_host = config.gateway.registry_host
    gateway = replace(
        config.gateway,
        host=_reachable(config.gateway.host),
        workers=deployment.worker_addresses,
        registry_host=_reachable(registry_host) if deployment.has_registry else registry_host,
        keys=None if config.gateway.keys is None else TENANTS_FOLDER / TENANTS,
    )
    cluster = replace(config.cluster, key_file=RUN / CLUSTER_KEY)
    return replace(config, gateway=gateway, tls=tls, cluster=cluster)


def worker_config(deployment: Deployment, role: WorkerRole) -> Config:
    """What a worker has of it all, with its pod's address and name as `POD_IP` and `POD_NAME`."""
    config = pods_config(deployment)
    name = f"{POD_NAME}.{deployment.domain(role)}"
    is_certified = deployment.has_registry and config.tls.is_complete
    worker = replace(
        config.worker,
        host=POD_IP,
        gateways=deployment.registries,
        announced_host=name if is_certified else None,
    )
    return replace(config, worker=worker, kv=replace(config.kv, host=name if has_kv_stream(config) else None))


def worker_overrides(deployment: Deployment, role: WorkerRole) -> list[str]:
    """The arguments with which a worker's pod tells it what the file cannot."""
    file = dict(leaves(pods_config(deployment)))
    told = ((key, value) for key, value in leaves(worker_config(deployment, role)) if value != file[key])
    return [word for key, value in told for word in ("--set", f"{key}={toml_value(value)}")]


def _reachable(host: str) -> str:
    return EVERYWHERE if is_loopback(host) else host


def _changed(config: Config) -> Iterator[tuple[str, object]]:
    """The keys that a process would not have by itself. The embedded model lies elsewhere in the pods' image."""
    default = dict(leaves(Config(model=ModelConfig(path=embedded_model_path(), name=EMBEDDED_MODEL_NAME))))
    return ((key, value) for key, value in leaves(config) if value != default[key])
