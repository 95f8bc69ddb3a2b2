"""Deployments for tests of their manifests, and how to find one's way in these."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from moonshard.serving.config.keys import ConfigError
from moonshard.serving.config.reading import load_config_for_others
from moonshard.serving.deploy.kubernetes.deployment import Deployment, Volume
from moonshard.serving.deploy.kubernetes.faults import deployment_faults
from moonshard.serving.deploy.kubernetes.files import manifest_files
from moonshard.serving.deploy.kubernetes.paths import SECRET_KEYS

NAMESPACE = "models"
PLAIN = ("cluster.key_file=/secrets/cluster.key", "kv.ports=[16000, 16007]", "kv.allow_unauthenticated=true")
TLS = ("tls.cert=/secrets/a.pem", "tls.key=/secrets/a.key", "tls.ca=/secrets/ca.pem", "kv.network_fence=policies")
SECURE = (*PLAIN[:2], *TLS, "gateway.keys=/secrets/tenants.toml")
MODEL = ("model.path=/models/kimi", "prefill.mesh={tensor=4}", "decode.mesh={expert=2, data=2}", "decode.replicas=3")
GANGS = ("prefill.mesh={tensor=4}", "prefill.processes=2", "decode.mesh={expert=4, data=2}", "decode.processes=4")
WRITING = ("gateway.ledger=/data/ledger.jsonl", "batches.path=/data/batches", "trace.path=/rows/trace")
FILES = (*WRITING, "kv.store.enabled=true", "kv.store.ssd_path=/blocks/ssd")
VOLUMES = tuple(
    Volume(path=PurePosixPath(path), claim=path.strip("/")) for path in ("/models", "/data", "/rows", "/blocks")
)

type Object = dict[str, Any]  # of whatever a manifest has


def described(*overrides: str, **fields: Any) -> Deployment:
    """ConfigError where it cannot run."""
    written = load_config_for_others(None, overrides, here=SECRET_KEYS)
    base = Deployment(config=written.config, image="registry/moonshard:1", name="kimi", namespace=NAMESPACE)
    deployment = replace(base, **fields)
    if faults := deployment_faults(deployment, written.keys):
        raise ConfigError(faults)
    return deployment


VARIANTS = {
    "plain": described(*PLAIN),
    "secure": described(*SECURE, *MODEL, volumes=VOLUMES[:1], device="nvidia.com/gpu"),
    "files": described(*PLAIN, *MODEL, *FILES, volumes=VOLUMES),
    "aggregated": described("mode=aggregated", "cluster.key_file=/secrets/cluster.key", num_gateways=3),
    "stream": described(*SECURE, "kv.transport=grpc"),
    "gangs": described(*PLAIN, *GANGS, "decode.replicas=2", device="nvidia.com/gpu"),
    "streaming gangs": described(*SECURE, *GANGS, "kv.transport=grpc"),
    "registered": described(*SECURE, *GANGS[2:], "gateway.registry=grpc", "decode.replicas=2", num_gateways=3),
}


@functools.cache
def objects(deployment: Deployment) -> list[Object]:
    return [manifest for manifests in manifest_files(deployment).values() for manifest in manifests]


def of_kind(deployment: Deployment, kind: str) -> list[Object]:
    return [each for each in objects(deployment) if each["kind"] == kind]


def named(deployment: Deployment, kind: str, name: str) -> Object:
    [found] = [each for each in of_kind(deployment, kind) if each["metadata"]["name"] == name]
    return found


def group_of(deployment: Deployment, component: str) -> Object:
    """What a worker is, as its LeaderWorkerSet says it."""
    return named(deployment, "LeaderWorkerSet", deployment.named(component))["spec"]["leaderWorkerTemplate"]


def template_of(deployment: Deployment, component: str) -> Object:
    """The pod template of a component: of a worker, of whoever leads it."""
    if component == "gateway":
        return named(deployment, "Deployment", deployment.named(component))["spec"]["template"]
    group = group_of(deployment, component)
    return group.get("leaderTemplate", group["workerTemplate"])


def container_of(deployment: Deployment, component: str) -> Object:
    return container_in(template_of(deployment, component))


def container_in(template: Object) -> Object:
    [container] = template["spec"]["containers"]
    return container


def file_in(folder: Path, text: str) -> Path:
    path = folder / "moonshard.toml"
    path.write_text(text)
    return path


def faults_of(*overrides: str, **fields: Any) -> Sequence[str]:
    """Empty where it can run."""
    try:
        described(*overrides, **fields)
    except ConfigError as error:
        return error.faults
    return ()
