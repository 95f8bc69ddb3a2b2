"""What comes from Secrets: the cluster's key, TLS, tenants. Manifests name them, and have nothing of what they hold.

Their contents are only written where that is asked for, by `secret_manifests`; else whoever applies the manifests makes
them with `creation_commands`, or lets another tool do so (cert-manager's Secrets have the same keys as that of TLS).
"""

import base64
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from moonshard.serving.config.cluster_key import key_of
from moonshard.serving.config.keys import Config, ConfigError
from moonshard.serving.config.tenants import KeyFileError, load_tenants
from moonshard.serving.config.tls import server_tls
from moonshard.serving.deploy.kubernetes.configuration import (
    CA,
    CERT,
    CLUSTER_FOLDER,
    CLUSTER_KEY,
    TENANTS,
    TENANTS_FOLDER,
    TLS_FOLDER,
    TLS_KEY,
)
from moonshard.serving.deploy.kubernetes.deployment import Deployment, Manifest

READABLE = 0o440  # by owner and group


@dataclass(frozen=True, slots=True)
class Secret:
    """One Secret, as pods have it mounted. `files`: by the names there, the files of this machine."""

    name: str
    folder: Path
    files: Callable[[Config], Mapping[str, Path | None]]
    kind: str = "Opaque"

    def volume(self, deployment: Deployment) -> Manifest:
        return {
            "name": f"secret-{self.name}",
            "secret": {"secretName": deployment.named(self.name), "defaultMode": READABLE},
        }

    def mount(self) -> Manifest:
        return {"name": f"secret-{self.name}", "mountPath": str(self.folder), "readOnly": True}

    def sources(self, config: Config) -> dict[str, Path]:
        """The files that the configuration names, by their names in the Secret; empty: there is no such Secret."""
        return {name: path for name, path in self.files(config).items() if path is not None}


CLUSTER = Secret("cluster", CLUSTER_FOLDER, lambda config: {CLUSTER_KEY: config.cluster.key_file})
TENANT_KEYS = Secret("tenants", TENANTS_FOLDER, lambda config: {TENANTS: config.gateway.keys})
TLS = Secret(
    "tls",
    TLS_FOLDER,
    lambda config: {CERT: config.tls.cert, TLS_KEY: config.tls.key, CA: config.tls.ca},
    "kubernetes.io/tls",
)
ALL = (CLUSTER, TLS, TENANT_KEYS)


def used(config: Config, *secrets: Secret) -> tuple[Secret, ...]:
    """Those of them that the configuration has."""
    return tuple(secret for secret in secrets if secret.sources(config))


def secret_manifests(deployment: Deployment) -> list[Manifest]:
    """With the contents of the files, which are checked first; a cluster key that is not there is made.

    ConfigError names every file that is of no use.
    """
    config = deployment.config
    if faults := [*_faults(config)]:
        raise ConfigError(faults)
    return [_manifest(deployment, secret) for secret in used(config, *ALL)]


def creation_commands(deployment: Deployment) -> list[str]:
    """Shell commands that make the Secrets."""
    return [_command(deployment, secret) for secret in used(deployment.config, *ALL)]


def _manifest(deployment: Deployment, secret: Secret) -> Manifest:
    files = secret.sources(deployment.config)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": deployment.metadata(deployment.named(secret.name)),
        "type": secret.kind,
        "data": {name: base64.b64encode(path.read_bytes()).decode() for name, path in files.items()},
    }


def _command(deployment: Deployment, secret: Secret) -> str:
    files = secret.sources(deployment.config)
    words = ["kubectl", "--namespace", deployment.namespace, "create", "secret", "generic"]
    words += [deployment.named(secret.name), f"--type={secret.kind}"]
    return shlex.join([*words, *(f"--from-file={name}={path}" for name, path in files.items())])


def _faults(config: Config) -> Iterator[str]:
    """Of the files, as the processes that read them would say it."""
    checks: list[Callable[[], object]] = [lambda: server_tls(config), lambda: load_tenants(config.gateway.keys)]
    if (path := config.cluster.key_file) is not None:
        checks.append(lambda: key_of(path))
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield from error.faults
        except KeyFileError as error:
            yield str(error)
