"""A pod that runs one process of a deployment: its container, what it has mounted, and how it ends.

It runs as a user without rights, who may read what comes from Secrets as their group. The cluster's key must be for its
owner alone, which no Secret can be for such a user: so an init container copies it into memory.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moonshard.serving.deploy.kubernetes.configuration import CLUSTER_FOLDER, CLUSTER_KEY, FILE, FOLDER, RUN, file_of
from moonshard.serving.deploy.kubernetes.deployment import Deployment, Manifest
from moonshard.serving.deploy.kubernetes.paths import pod_volumes
from moonshard.serving.deploy.kubernetes.secrets import CLUSTER, Secret

USER = 10001
STATE = "/var/lib/moonshard"  # the user's home: programs that were compiled outlive the process there, not the pod


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What a pod runs. `command` may have `POD_IP` and `POD_NAME` in it."""

    component: str
    command: Sequence[str]
    ports: Mapping[str, int]
    probes: Manifest
    secrets: Sequence[Secret]
    ends_within_s: float  # of a SIGTERM
    waits_s: int = 0  # before it
    devices: Mapping[str, int]  # extended resources


def pod_template(deployment: Deployment, program: Program) -> Manifest:
    volumes, mounts = _volumes(deployment, program)
    digest = hashlib.sha256(file_of(deployment).encode()).hexdigest()  # pods with another file are others
    return {
        "metadata": {
            "labels": deployment.labels(program.component),
            "annotations": {"moonshard/configuration": digest},
        },
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": program.waits_s + math.ceil(program.ends_within_s),
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "initContainers": [_key_copier(deployment)],
            "containers": [_container(deployment, program, mounts)],
            "volumes": volumes,
        },
    }


def configured(*command: str) -> list[str]:
    """A `moonshard` command with the file that all pods have."""
    return ["moonshard", *command, "--config", str(FOLDER / FILE)]


def _container(deployment: Deployment, program: Program, mounts: list[Manifest]) -> Manifest:
    container: Manifest = {
        "name": program.component,
        "image": deployment.image,
        "command": list(program.command),
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "HOME", "value": STATE},
        ],
        **program.probes,
        "securityContext": _without_rights(),
        "volumeMounts": mounts,
    }
    if program.ports:
        container["ports"] = [{"name": name, "containerPort": port} for name, port in program.ports.items()]
    if program.devices:
        container["resources"] = {"limits": dict(program.devices)}
    if program.waits_s:
        container["lifecycle"] = {"preStop": {"sleep": {"seconds": program.waits_s}}}
    return container


def _key_copier(deployment: Deployment) -> Manifest:
    """`-f`: it may run again in a pod that has the copy already."""
    copy = f"umask 077 && cp -f {CLUSTER_FOLDER / CLUSTER_KEY} {RUN / CLUSTER_KEY}"
    return {
        "name": "cluster-key",
        "image": deployment.image,
        "command": ["sh", "-c", copy],
        "securityContext": _without_rights(),
        "volumeMounts": [CLUSTER.mount(), {"name": "run", "mountPath": str(RUN)}],
    }


def _without_rights() -> Manifest:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _volumes(deployment: Deployment, program: Program) -> tuple[list[Manifest], list[Manifest]]:
    """(volumes, mounts of the main container)."""
    volumes: list[Manifest] = [
        {"name": "config", "configMap": {"name": deployment.named("config")}},
        {"name": "state", "emptyDir": {}},
        {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        CLUSTER.volume(deployment),
    ]
    mounts: list[Manifest] = [
        {"name": "config", "mountPath": str(FOLDER), "readOnly": True},
        {"name": "state", "mountPath": STATE},
        {"name": "run", "mountPath": str(RUN), "readOnly": True},
    ]
    for secret in program.secrets:
        volumes.append(secret.volume(deployment))
        mounts.append(secret.mount())
    claimed, claimed_mounts = pod_volumes(deployment, program.component)
    return volumes + claimed, mounts + claimed_mounts
