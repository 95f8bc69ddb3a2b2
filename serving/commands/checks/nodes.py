"""What `moonshard serve --launcher ray` makes of its options: what cannot run on nodes, and what is placed there."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from moonshard.rpc.addresses import is_address
from moonshard.serving.config.cluster_key import key_file_of, load_key
from moonshard.serving.config.keys import Config, mesh_of, processes_of, workers_of

if TYPE_CHECKING:
    from moonshard.serving.deploy.on_ray.launcher import RayPlan


def option_faults(launcher: str, address: str | None, device: str | None) -> Iterator[str]:
    if launcher != "ray":
        given = {"--ray-address": address, "--ray-device": device}
        yield from (f"{option}: only with --launcher ray" for option, value in given.items() if value is not None)
    elif address is not None and not is_address(address):
        yield f"--ray-address: expected host:port, at which `ray start --head` listens, got {address!r}"


def node_faults(config: Config) -> Iterator[str]:
    """Of a configuration for workers that are on any nodes."""
    if config.kv.host is not None:
        yield f"kv.host: leave it out; each node has its own address, and {config.kv.host} is at most that of one"
    if config.gateway.registry != "list":
        yield "gateway.registry: leave it out; the gateway is told where Ray has placed the workers"
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
            name,
            processes_of(config, role),
            process_bundle(mesh_of(config, role).num_devices // processes_of(config, role), device),
        )
        for name, role in workers_of(config).items()
    ]
    key = load_key(key_file_of(config, os.environ)).hex()
    return RayPlan(address=address, workers=workers, environment=carried(os.environ), key=key)
