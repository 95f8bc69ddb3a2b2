"""The folders and files of the configuration that pods of each kind read or write, and the volumes these lie in."""

from collections.abc import Sequence
from pathlib import Path

from moonshard.serving.config.keys import Config, embedded_model_path
from moonshard.serving.deploy.kubernetes.deployment import GATEWAY, Deployment, Manifest, Volume

# What comes from Secrets: these keys name files of the machine on which manifests are made.
SECRET_KEYS = frozenset({"gateway.keys", "cluster.key_file", "tls.cert", "tls.key", "tls.ca"})


def read_paths(config: Config, component: str) -> dict[str, Path]:
    """By key, what pods of that component read and the image may hold as well."""
    paths = {"model.path": None if config.model.path == embedded_model_path() else config.model.path}
    if component != GATEWAY:
        paths["speculation.path"] = config.speculation.path
        key, own = ("prefill", config.prefill) if component == "prefill" else ("decode", config.decode)
        paths[f"{key}.expert_loads"] = own.expert_loads
    return {key: path for key, path in paths.items() if path is not None}


def written_paths(config: Config, component: str) -> dict[str, Path]:
    """By key, what pods of that component write, which must outlive them."""
    paths = {"trace.path": config.trace.path}
    if component == GATEWAY:
        paths |= {"gateway.ledger": config.gateway.ledger, "batches.path": config.batches.path}
    elif config.kv.store.enabled:
        paths["kv.store.ssd_path"] = config.kv.store.ssd_path
    return {key: path for key, path in paths.items() if path is not None}


def volumes_of(deployment: Deployment, component: str) -> list[tuple[Volume, bool]]:
    """Those in which something of that component lies; whether it only reads there."""
    config = deployment.config
    read, written = (list(of(config, component).values()) for of in (read_paths, written_paths))
    return [
        (volume, not _holds_any(volume, written))
        for volume in deployment.volumes
        if _holds_any(volume, [*read, *written])
    ]


def pod_volumes(deployment: Deployment, component: str) -> tuple[list[Manifest], list[Manifest]]:
    """(volumes, mounts) of a pod for those."""
    volumes, mounts = list[Manifest](), list[Manifest]()
    for number, (volume, is_read) in enumerate(volumes_of(deployment, component)):
        name = f"claim-{number}"
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": volume.claim, "readOnly": is_read}})
        mounts.append({"name": name, "mountPath": str(volume.path), "readOnly": is_read})
    return volumes, mounts


def _holds_any(volume: Volume, paths: Sequence[Path]) -> bool:
    return any(volume.has(path) for path in paths)
