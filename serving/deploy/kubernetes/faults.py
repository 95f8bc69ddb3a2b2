"""What of a deployment cannot run in pods, each fault with the key or the option to change. See `config.faults`, whose
faults are told with these: those of the configuration as pods would have it.

What only a cluster knows (whether it enforces NetworkPolicies, has the image, binds the claims) is not found here.
"""

import re
from collections.abc import Iterator

from moonshard.serving.config.faults import has_mooncake, joint_faults
from moonshard.serving.config.keys import Config, port_key, port_of, roles_of
from moonshard.serving.deploy.kubernetes.configuration import EVERYWHERE, worker_config
from moonshard.serving.deploy.kubernetes.deployment import GATEWAY, MAX_NAME, Deployment
from moonshard.serving.deploy.kubernetes.paths import volumes_of, written_paths

_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")  # RFC 1035, as names of Services are
_EVERY_ADDRESS = (EVERYWHERE, "::")
_FILLED_IN = {
    "gateway.workers": "they are those of the manifests",
    "worker.gateways": "where workers register, it is the Service of the manifests",
    "worker.announced_host": "each pod has its own",
    "kv.host": "each pod has its own",
}


def deployment_faults(deployment: Deployment, written: frozenset[str]) -> list[str]:
    """All of them. `written`: the keys that the user has set."""
    config = deployment.config
    faults = [*_name_faults(deployment), *_host_faults(config, written), *_port_faults(config)]
    faults += [*_key_faults(config), *_store_faults(config), *_path_faults(deployment)]
    joint = (fault for role in roles_of(config) for fault in joint_faults(worker_config(deployment, role)))
    ours = tuple(f"{key}:" for key in _FILLED_IN)  # what is wrong with those was wrong with what they are made of
    return faults + [fault for fault in dict.fromkeys(joint) if not fault.startswith(ours)]


def _name_faults(deployment: Deployment) -> Iterator[str]:
    if not deployment.image or re.search(r"\s", deployment.image):
        yield f"--image: expected an image such as registry/moonshard:1, got {deployment.image!r}"
    for option, name, most in (("--name", deployment.name, MAX_NAME), ("--namespace", deployment.namespace, 63)):
        if not _LABEL.fullmatch(name) or len(name) > most:
            yield f"{option}: expected at most {most} small letters, digits and -, a letter first, got {name!r}"
    if deployment.num_gateways < 1:
        yield f"--gateways: expected 1 or more, got {deployment.num_gateways}"


def _host_faults(config: Config, written: frozenset[str]) -> Iterator[str]:
    hosts = {"gateway.host": config.gateway.host, "worker.host": config.worker.host}
    if config.gateway.registry == "grpc":
        hosts["gateway.registry_host"] = config.gateway.registry_host
    for key, host in hosts.items():
        if key in written and host not in _EVERY_ADDRESS:
            yield f"{key}: at {host} nobody reaches a pod; leave it out, or set {EVERYWHERE}"
    for key, why in _FILLED_IN.items():
        if key in written:
            yield f"{key}: leave it out; {why}"
    if config.gateway.allowed_hosts and "*" not in config.gateway.allowed_hosts:
        yield (
            "gateway.allowed_hosts: Prometheus asks each pod by its address, which is none of these; "
            "leave it out, and let what routes requests to the gateway look at names"
        )


def _port_faults(config: Config) -> Iterator[str]:
    ports = {"gateway.port": config.gateway.port, "gateway.grpc_port": config.gateway.grpc_port}
    ports |= {port_key(role): port_of(config, role) for role in roles_of(config)}
    if config.gateway.registry == "grpc":
        ports["gateway.registry_port"] = config.gateway.registry_port
    yield from (f"{key}: 0 is any free port, which no Service can name" for key, port in ports.items() if port == 0)
    if has_mooncake(config) and config.kv.ports is None:
        yield "kv.ports: set the first and the last, which a NetworkPolicy fences; it cannot where Mooncake chooses"


def _key_faults(config: Config) -> Iterator[str]:
    if config.cluster.key_file is None:
        yield "cluster.key_file: name the file whose copy is the Secret; else each pod would make a key of its own"


def _store_faults(config: Config) -> Iterator[str]:
    """Its blocks go through memory that a worker and the store's client on the same machine have both mapped."""
    store = config.kv.store
    keys = {"kv.store.dram_bytes": store.dram_bytes > 0, "kv.store.client": store.client is not None}
    for key, is_set in keys.items():
        if store.enabled and is_set:
            yield (
                f"{key}: a worker and Mooncake Store's client share memory, which two pods cannot, and its master, if "
                "not somebody else's, is one for a single machine; use kv.store.host_bytes and kv.store.ssd_path"
            )


def _path_faults(deployment: Deployment) -> Iterator[str]:
    config, volumes = deployment.config, deployment.volumes
    written = {
        key: path for component in deployment.components for key, path in written_paths(config, component).items()
    }
    for key, path in written.items():
        if not any(volume.has(path) for volume in volumes):
            yield f"{key}: {path} would end with its pod; name the claim that holds it: --volume {path.parent}=CLAIM"
    used = {volume for component in deployment.components for volume, _ in volumes_of(deployment, component)}
    for volume in volumes:
        if volume not in used:
            yield f"--volume {volume.path}={volume.claim}: no key of the configuration names a path there"
    if deployment.num_gateways > 1:
        alone = [key for key in written_paths(config, GATEWAY) if key != "trace.path"]
        yield from (f"{key}: it is of one gateway alone, and --gateways is {deployment.num_gateways}" for key in alone)
