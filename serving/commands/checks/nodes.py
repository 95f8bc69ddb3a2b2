"""What `moonshard serve --launcher ray` makes of its options: what cannot run on nodes, and what is placed there."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from moonshard.serving.config.cluster_key import key_file_of, load_key
from moonshard.serving.config.keys import Config, command_of, mesh_of, processes_of, replicas_of, roles_of

if TYPE_CHECKING:
    from moonshard.serving.deploy.on_ray.launcher import RayPlan


def option_faults(launcher: str, address: str | None, device: str | None) -> Iterator[str]:
    if launcher != "ray":
        given = {"--ray-address": address, "--ray-device": device}
        yield from (f"{option}: only with --launcher ray" for option, value in given.items() if value is not None)
    elif address is not None and not _is_address(address):
        yield f"--ray-address: expected host:port, at which `ray start --head` listens, got {address!r}"


def node_faults(config: Config) -> Iterator[str]:
    """Of a configuration for workers that are on any nodes."""
    if config.kv.host is not None:
        yield f"kv.host: leave it out; each node has its own address, and {config.kv.host} is at most that of one"
    store = config.kv.store
    keys = {"kv.store.dram_bytes": store.dram_bytes > 0, "kv.store.client": store.client is not None}
    for key, is_set in keys.items():
        if store.enabled and is_set:
            yield (
                f"{key}: workers share memory with Mooncake Store's client on their machine, and which one that is Ray "
                "decides; use kv.store.host_bytes and kv.store.ssd_path"
            )


def plan_of(config: Config, address: str | None, device: str | None) -> "RayPlan":
    """ConfigError for a cluster's key that cannot be read."""
    from moonshard.serving.deploy.on_ray.launcher import RayPlan, carried
    from moonshard.serving.deploy.on_ray.placement import WorkerNeeds, process_bundle

    workers = [
        WorkerNeeds(
            f"{command_of(role)} {index}",
            processes_of(config, role),
            process_bundle(mesh_of(config, role).num_devices // processes_of(config, role), device),
        )
        for role in roles_of(config)
        for index in range(replicas_of(config, role))
    ]
    key = load_key(key_file_of(config, os.environ)).hex()
    return RayPlan(address=address, workers=workers, environment=carried(os.environ), key=key)


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and "/" not in host and port.isascii() and port.isdigit() and 0 < int(port) <= 65_535
