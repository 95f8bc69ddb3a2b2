"""The manifests as YAML files: which there are, and how they are written."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from moonshard.serving.config.keys import ConfigError, roles_of
from moonshard.serving.deploy.kubernetes.configuration import FILE, file_of
from moonshard.serving.deploy.kubernetes.deployment import Deployment, Manifest
from moonshard.serving.deploy.kubernetes.gateway import gateway_manifests, service_monitor
from moonshard.serving.deploy.kubernetes.network import network_policies
from moonshard.serving.deploy.kubernetes.workers import worker_manifests


def manifest_files(deployment: Deployment) -> dict[str, list[Manifest]]:
    """The objects of each file. `kubectl apply` takes files by their names: what workers need comes before them."""
    return {
        "configuration.yaml": [_configuration(deployment)],
        "gateway.yaml": gateway_manifests(deployment),
        "monitoring.yaml": [service_monitor(deployment)],
        "network.yaml": network_policies(deployment),
        "workers.yaml": [each for role in roles_of(deployment.config) for each in worker_manifests(deployment, role)],
    }


def write_files(folder: Path, files: Mapping[str, Sequence[Manifest]]) -> None:
    """Over those of the same names. ConfigError where they cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, manifests in files.items():
            (folder / name).write_text(as_yaml(manifests))
    except OSError as error:
        raise ConfigError([f"--out {folder}: {error.strerror}"]) from error


def write_secrets(path: Path, manifests: Sequence[Manifest]) -> None:
    """A file for its owner alone, from before there is anything in it. ConfigError as above."""
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            os.fchmod(file.fileno(), 0o600)  # one that was there already
            file.write(as_yaml(manifests))
    except OSError as error:
        raise ConfigError([f"--secrets {path}: {error.strerror}"]) from error


def as_yaml(manifests: Sequence[Manifest]) -> str:
    """One document for each."""
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Nothing by reference, and texts of several lines as they are."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def _configuration(deployment: Deployment) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": deployment.metadata(deployment.named("config")),
        "data": {FILE: file_of(deployment)},
    }
