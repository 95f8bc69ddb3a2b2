"""The configuration as pods have it: one file for all of them, and what each worker is told beside it.

Of the file that `moonshard serve` reads the addresses change, and the paths of what comes from Secrets; whatever has
its default is left out. A worker listens at its pod's own address, which no file can name: so it has a name of its own
in recordings and spans, and KV comes to it by that address, which no resolver remembers from the pod before it. KV that
goes over gRPC goes to the pod's name, since that is what a certificate can have.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

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
    has_tls, host = config.tls.is_complete, config.gateway.host
    tls = TlsConfig(cert=TLS_FOLDER / CERT, key=TLS_FOLDER / TLS_KEY, ca=TLS_FOLDER / CA) if has_tls else config.tls
    gateway = replace(
        config.gateway,
        host=EVERYWHERE if is_loopback(host) else host,
        workers=deployment.worker_addresses,
        keys=None if config.gateway.keys is None else TENANTS_FOLDER / TENANTS,
    )
    cluster = replace(config.cluster, key_file=RUN / CLUSTER_KEY)
    return replace(config, gateway=gateway, tls=tls, cluster=cluster)


def worker_config(deployment: Deployment, role: WorkerRole) -> Config:
    """What a worker has of it all, with its pod's address and name as `POD_IP` and `POD_NAME`."""
    config = pods_config(deployment)
    return replace(
        config,
        worker=replace(config.worker, host=POD_IP),
        kv=replace(config.kv, host=_kv_host(deployment, role)),
    )


def worker_overrides(deployment: Deployment, role: WorkerRole) -> list[str]:
    """The arguments with which a worker's pod tells it what the file cannot."""
    hosts = {"worker.host": POD_IP, "kv.host": _kv_host(deployment, role)}
    return [word for key, host in hosts.items() if host is not None for word in ("--set", f"{key}={host}")]


def _kv_host(deployment: Deployment, role: WorkerRole) -> str | None:
    """None: `worker.host`."""
    config = deployment.config
    has_stream = config.mode == "disaggregated" and config.kv.transport == "grpc"
    return f"{POD_NAME}.{deployment.domain(role)}" if has_stream else None


def _changed(config: Config) -> Iterator[tuple[str, object]]:
    """The keys that a process would not have by itself. The embedded model lies elsewhere in the pods' image."""
    default = dict(leaves(Config(model=ModelConfig(path=embedded_model_path(), name=EMBEDDED_MODEL_NAME))))
    return ((key, value) for key, value in leaves(config) if value != default[key])
