"""`moonshard manifests`."""

import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated

import tyro

from moonshard.serving.commands.options import Configured, optional_argument
from moonshard.serving.config.keys import ConfigError
from moonshard.serving.config.reading import load_config_for_others

if TYPE_CHECKING:
    from moonshard.serving.deploy.kubernetes.deployment import Deployment, Volume

Volumes = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="PATH=CLAIM")]


def manifests(
    options: Configured,
    out: Path,
    image: str,
    name: str = "moonshard",
    namespace: str = "default",
    gateways: int = 1,
    volume: Volumes = (),
    device: Annotated[str | None, optional_argument("RESOURCE")] = None,
    secrets: Annotated[Path | None, optional_argument("FILE")] = None,
) -> int:
    """Write Kubernetes manifests of the deployment that the configuration describes.

    A LeaderWorkerSet for each kind of worker, with a pod for each of its processes, a Deployment for the gateway, and
    what they need. Paths in the configuration are those of the pods, but for tls.cert, tls.key, tls.ca, gateway.keys
    and cluster.key_file, which are files of this machine and become Secrets.

    Args:
        out: the folder to write them to, for `kubectl apply -f`.
        image: the pods' container image, which has `moonshard` and `sh` on its PATH.
        name: what the names of all objects begin with.
        namespace: where they belong; it must be there.
        gateways: how many gateways answer behind the Service.
        volume: a PersistentVolumeClaim, and the folder where pods whose paths lie there have it. May be repeated.
        device: the extended resource, for example nvidia.com/gpu, of which a worker's pod asks for one per device of
            its mesh, or of its part of that. By default for none: workers compute on CPUs.
        secrets: also write the Secrets, with the contents of their files, to this file for its owner alone. By default
            nothing of what they hold is written, and the commands are shown that make them.
    """
    from moonshard.serving.deploy.kubernetes.deployment import Deployment
    from moonshard.serving.deploy.kubernetes.faults import deployment_faults
    from moonshard.serving.deploy.kubernetes.files import manifest_files, write_files, write_secrets
    from moonshard.serving.deploy.kubernetes.paths import SECRET_KEYS
    from moonshard.serving.deploy.kubernetes.secrets import secret_manifests

    written = load_config_for_others(options.config, options.set, here=SECRET_KEYS)
    deployment = Deployment(
        config=written.config,
        image=image,
        name=name,
        namespace=namespace,
        num_gateways=gateways,
        volumes=_volumes(volume),
        device=device,
    )
    if faults := deployment_faults(deployment, written.keys):
        raise ConfigError(faults)
    holding = None if secrets is None else secret_manifests(deployment)
    write_files(out, manifest_files(deployment))
    if secrets is not None and holding is not None:
        write_secrets(secrets, holding)
    sys.stdout.write(_next_steps(deployment, out, secrets))
    return 0


def _volumes(given: tuple[str, ...]) -> "tuple[Volume, ...]":
    from moonshard.serving.deploy.kubernetes.deployment import Volume

    volumes, faults = list[Volume](), list[str]()
    for text in given:
        path, _, claim = text.partition("=")
        if claim and path.startswith("/"):
            volumes.append(Volume(path=PurePosixPath(path), claim=claim))
        else:
            faults.append(f"--volume {text}: expected /FOLDER=CLAIM, for example /models=models")
    if faults:
        raise ConfigError(faults)
    return tuple(volumes)


def _next_steps(deployment: "Deployment", out: Path, secrets: Path | None) -> str:
    from moonshard.serving.deploy.kubernetes.secrets import creation_commands

    making = creation_commands(deployment) if secrets is None else [f"kubectl apply -f {secrets}"]
    names = " ".join(deployment.certificate_names)
    noted = [f"# tls.cert must be good for {names}"] if deployment.config.tls.is_complete else []
    return "\n".join([*noted, *making, f"kubectl apply -f {out}"]) + "\n"
