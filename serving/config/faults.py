"""Values that are valid alone and do not fit together, each fault with the key to change.

Bounds of single values are in `keys`, what is missing on disk is found in `reading`. What only a loaded model can tell
(a slab smaller than one block, a context beyond the pool) is found by whoever loads it.
"""

import re
from collections import Counter
from urllib.parse import urlsplit

from moonshard.rpc.addresses import host_port, is_address
from moonshard.serving.config.keys import (
    MAX_DEVICES,
    Config,
    GatewayConfig,
    KvConfig,
    TelemetryConfig,
    TlsConfig,
    WorkerConfig,
    embedded_model_path,
    kv_host_of,
)
from moonshard.serving.config.kv_ports import store_port_fault, too_few_ports, workers_have_mooncake
from moonshard.serving.config.loopback import EVERYWHERE, is_loopback
from moonshard.sharding.rules import MeshError, Rules, check_rules
from moonshard.sharding.shape import MeshShape

_NAME_AND_PORT = r"(\[[0-9a-f:.]+\]|[^\s/@?#:*\[\]A-Z]+)(:[0-9]{1,5})?"
_HOST = re.compile(_NAME_AND_PORT)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://" + _NAME_AND_PORT)
MIN_DRAM_BYTES = 16 * 1024**2  # with less `mooncake_client` does not start


def joint_faults(config: Config) -> list[str]:
    """All of them; empty for a configuration that can be served."""
    faults = [*_address_faults(config), *_size_faults(config), *_tls_faults(config.tls)]
    faults += [*_telemetry_faults(config.telemetry), *_speculation_faults(config), *_store_faults(config.kv)]
    faults += _gang_faults(config)
    if config.mode == "disaggregated":
        faults += _handoff_faults(config)
    if _has_plane(config):
        faults += [*_port_faults(config), *_plane_faults(config)]
    return faults


def kv_plane_note(config: Config) -> str | None:
    """What the logs say of a KV plane beyond loopback: who can reach it, in the words of the configuration."""
    place = _beyond_loopback(config)
    if place is None or not _has_plane(config):
        return None
    _, host = place
    if has_mooncake(config) and config.kv.network_fence:
        return f"the KV plane of {host} is not authenticated; its network is fenced: {config.kv.network_fence}"
    if config.kv.allow_unauthenticated:
        return f"the KV plane of {host} is open to whoever reaches it (kv.allow_unauthenticated)"
    return None


def _speculation_faults(config: Config) -> list[str]:
    speculation = config.speculation
    methods, path = speculation.methods, speculation.path
    faults = [f"speculation.method: {method} is named twice" for method, times in Counter(methods).items() if times > 1]
    if "eagle3" in methods and "mtp" in methods:
        faults.append("speculation.method: eagle3 and mtp are two draft models; name one")
    if path is not None and "eagle3" not in methods:
        faults.append("speculation.path: only eagle3 has a folder of its own; see speculation.method")
    if "eagle3" in methods and path is None and config.model.path != embedded_model_path():
        faults.append("speculation.path: eagle3 needs the folder of a draft for this model")
    meshes = {"decode": config.decode.mesh}
    if config.mode == "disaggregated":
        meshes["prefill"] = config.prefill.mesh
    if draft := speculation.draft_model:
        faults += [
            f"speculation.method: {draft} needs all layers in one stage, and {name}.mesh.pipe is {mesh.pipe}"
            for name, mesh in meshes.items()
            if mesh.pipe > 1
        ]
    return faults


def _gang_faults(config: Config) -> list[str]:
    """Of workers that are several processes."""
    faults = []
    for name, own in (("prefill", config.prefill), ("decode", config.decode)):
        num_devices = own.mesh.num_devices
        if own.processes == 1 or (name == "prefill" and config.mode == "aggregated"):
            continue
        key = f"{name}.processes"
        if num_devices % own.processes:
            faults.append(f"{key}: {own.processes} do not divide the {num_devices} devices of {name}.mesh ({own.mesh})")
        elif fault := _uneven_stages(own.mesh, own.processes):
            faults.append(f"{key}: {fault} of {name}.mesh ({own.mesh})")
        if config.kv.store.enabled and own.mesh.pipe > 1:
            faults.append(f"{key}: with kv.store.enabled a gang has no stages, and {name}.mesh.pipe is {own.mesh.pipe}")
        elif config.kv.store.enabled and own.mesh.num_partitions % own.processes:
            faults.append(
                f"{key}: with kv.store.enabled each process has whole partitions, and {own.processes} do not divide "
                f"the {own.mesh.num_partitions} of {name}.mesh ({own.mesh})"
            )
        if not is_loopback(config.worker.host) and not (config.kv.network_fence or config.kv.allow_unauthenticated):
            faults.append(
                f"worker.host: {config.worker.host} opens the collectives of a gang, to which nobody has to prove "
                "anything, to whoever reaches it; name the fence of that network in kv.network_fence"
            )
    return faults


def _uneven_stages(mesh: MeshShape, num_processes: int) -> str | None:
    """What is wrong where a process would have a part of one stage and some of another."""
    in_process, in_stage = mesh.num_devices // num_processes, mesh.num_devices // mesh.pipe
    if in_process % in_stage == 0 or in_stage % in_process == 0:
        return None
    return f"{num_processes} with {in_process} devices each would cut through the {mesh.pipe} stages of {in_stage}"


def _store_faults(kv: KvConfig) -> list[str]:
    store = kv.store
    if not store.enabled:
        return []
    faults = [] if kv.prefix_cache else ["kv.store.enabled: without kv.prefix_cache nothing is found again"]
    if not (store.host_bytes or store.is_shared or store.ssd_path):
        tiers = "kv.store.host_bytes, kv.store.dram_bytes or kv.store.ssd_path"
        faults.append(f"kv.store.enabled: there is no tier; set {tiers}")
    if store.master is not None and not store.dram_bytes:
        faults.append("kv.store.master: without kv.store.dram_bytes there is nothing of this machine in Mooncake Store")
    if 0 < store.dram_bytes < MIN_DRAM_BYTES:
        faults.append(f"kv.store.dram_bytes: {store.dram_bytes} is too little for Mooncake; 0, or {MIN_DRAM_BYTES}")
    malformed = [
        f"kv.store.{key}: expected host:port, got {address!r}"
        for key, address in (("master", store.master), ("client", store.client))
        if address is not None and not is_address(address)
    ]
    if store.is_shared and not malformed:
        faults += _machines_faults(kv)
    return faults + malformed


def _machines_faults(kv: KvConfig) -> list[str]:
    """Of the name by which Mooncake Store calls this machine: others reach it by that, where they share a master."""
    host = _host_of(kv.store.client) or kv.host
    faults = []
    if host is not None and ":" in host:
        key = "kv.store.client" if kv.store.client else "kv.host"
        faults.append(f"{key}: Mooncake Store is reached by a name or an IPv4 address, not by {host}")
    master = _host_of(kv.store.master)
    if kv.store.dram_bytes and master and not is_loopback(master) and (host is None or is_loopback(host)):
        faults.append(f"kv.host: name the address by which other machines reach this one; {master} is one of them")
    return faults


def _address_faults(config: Config) -> list[str]:
    gateway = config.gateway
    faults = [f"gateway.workers: expected host:port, got {w!r}" for w in gateway.workers if not is_address(w)]
    faults += [f"gateway.workers: {w!r} is named twice" for w, times in Counter(gateway.workers).items() if times > 1]
    faults += [*_browser_faults(gateway), *_registry_faults(config)]
    if gateway.port == gateway.grpc_port != 0:
        faults.append(f"gateway.grpc_port: {gateway.grpc_port} is gateway.port too; HTTP and gRPC need one each")
    return faults


def _registry_faults(config: Config) -> list[str]:
    gateway, worker = config.gateway, config.worker
    faults = [f"worker.gateways: expected host:port, got {g!r}" for g in worker.gateways if not is_address(g)]
    faults += [f"worker.gateways: {g!r} is named twice" for g, times in Counter(worker.gateways).items() if times > 1]
    if gateway.registry == "grpc":
        if gateway.workers:
            faults.append('gateway.workers: with gateway.registry = "grpc" workers name themselves; leave it empty')
        if gateway.registry_port in (gateway.port, gateway.grpc_port) and gateway.registry_port:
            faults.append(f"gateway.registry_port: {gateway.registry_port} is the port of a front too; take another")
    if worker.announced_host and not is_address(host_port(worker.announced_host, 1)):
        faults.append(f"worker.announced_host: expected a host, got {worker.announced_host!r}")
    return faults


def announced_faults(worker: WorkerConfig) -> list[str]:
    """Whether gateways with which a worker registers reach it where it says that it is. Of a worker that starts:
    whoever else reads the same configuration may be elsewhere.
    """
    hosts = {"worker.host": worker.host, "worker.announced_host": worker.announced_host or worker.host}
    announced = hosts["worker.announced_host"]
    if worker.gateways and announced in EVERYWHERE:
        key = next(key for key, host in hosts.items() if host == announced)
        return [f"{key}: gateways reach no worker at {announced}; name the address of this machine"]
    named = (g for g in worker.gateways if is_address(g))
    elsewhere = next((g for g in named if not is_loopback(g.rpartition(":")[0].strip("[]"))), None)
    here = next((key for key, host in hosts.items() if is_loopback(host)), None)
    if elsewhere is None or here is None:
        return []
    return [f"{here}: {elsewhere} may be another machine, which reaches no worker at {hosts[here]}"]


def _browser_faults(gateway: GatewayConfig) -> list[str]:
    """What no browser ever sends in Origin or Host would never be found there."""
    faults = [
        f"gateway.allowed_origins: expected *, null or an origin such as https://chat.example.com, got {origin!r}"
        for origin in gateway.allowed_origins
        if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin)
    ]
    return faults + [
        f"gateway.allowed_hosts: expected *, a name or name:port, in lower case, got {host!r}"
        for host in gateway.allowed_hosts
        if host != "*" and not _HOST.fullmatch(host)
    ]


def _size_faults(config: Config) -> list[str]:
    prefill, decode, kv = config.prefill, config.decode, config.kv
    faults = []
    if prefill.chunk_tokens is not None and prefill.chunk_tokens % kv.block_size:
        faults.append(
            f"prefill.chunk_tokens: {prefill.chunk_tokens} is not a multiple of kv.block_size ({kv.block_size})"
        )
    roles = {"decode": decode} if config.mode == "aggregated" else {"prefill": prefill, "decode": decode}
    for name, role in roles.items():
        if role.mesh.num_devices > MAX_DEVICES:
            faults.append(f"{name}.mesh: {role.mesh} is {role.mesh.num_devices} devices; at most {MAX_DEVICES}")
        faults += _rule_faults(name, role.mesh, role.rules, kv.block_size)
    faults += [
        f"{name}.max_slots: {role.max_slots} cannot be shared out equally among the "
        f"{role.mesh.num_partitions} partitions (data x expert) of {name}.mesh"
        for name, role in roles.items()
        if role.max_slots % role.mesh.num_partitions
    ]
    faults += [
        f"{name}.redundant_experts: {role.redundant_experts} copies, but no {name}.expert_loads that says of which"
        for name, role in roles.items()
        if role.redundant_experts and role.expert_loads is None
    ]
    return faults


def _rule_faults(name: str, mesh: MeshShape, rules: Rules, block_size: int) -> list[str]:
    try:
        check_rules(rules)
    except MeshError as error:
        return [f"{name}.{error}"]
    if rules.kv_tokens and block_size % mesh.tensor:
        return [f"{name}.rules.kv_tokens: mesh.tensor = {mesh.tensor} does not divide kv.block_size ({block_size})"]
    return []


def _tls_faults(tls: TlsConfig) -> list[str]:
    files = {"tls.cert": tls.cert, "tls.key": tls.key, "tls.ca": tls.ca}
    named = [key for key, path in files.items() if path is not None]
    if not named or len(named) == len(files):
        return []
    missing = [key for key in files if key not in named]
    return [f"{key}: not set, but {' and '.join(named)} is; [tls] needs all three files or none" for key in missing]


def endpoint_fault(endpoint: str) -> str | None:
    """Why nothing can be exported there; None where it may. What might be a password is not quoted."""
    if "@" in endpoint:
        return (
            "names a user or a password (@), which logs and command lines would show; what a collector asks for goes "
            "into OTEL_EXPORTER_OTLP_HEADERS"
        )
    try:
        url = urlsplit(endpoint)
        is_url = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # of a port or an address
        is_url = False
    return None if is_url else f"expected http://host:port or https://host:port, got {endpoint!r}"


def _telemetry_faults(telemetry: TelemetryConfig) -> list[str]:
    fault = None if telemetry.endpoint is None else endpoint_fault(telemetry.endpoint)
    return [] if fault is None else [f"telemetry.endpoint: {fault}"]


def _handoff_faults(config: Config) -> list[str]:
    faults = []
    if config.kv.lease_s <= config.gateway.queue_timeout_s:
        faults.append(
            f"kv.lease_s: {config.kv.lease_s:g} includes the wait for a decode worker, and must be more than "
            f"gateway.queue_timeout_s ({config.gateway.queue_timeout_s:g})"
        )
    if config.prefill.port == config.decode.port != 0:
        faults.append(f"decode.port: {config.decode.port} is prefill.port too; they need one each")
    if kv_host_of(config) in EVERYWHERE:
        faults.append(f"kv.host: peers reach no machine at {kv_host_of(config)}; name this one")
    return faults


def _port_faults(config: Config) -> list[str]:
    if config.kv.store.client is not None and not is_address(config.kv.store.client):
        return []  # which is told by its key
    return [fault for fault in (too_few_ports(config), store_port_fault(config)) if fault is not None]


def _plane_faults(config: Config) -> list[str]:
    """Whether KV would be served beyond loopback to whoever reaches it without the user having said so."""
    place = _beyond_loopback(config)
    if place is None or config.kv.allow_unauthenticated or _is_fenced(config):
        return []
    key, host = place
    if has_mooncake(config):
        return [
            f"{key}: {host} is not loopback, and Mooncake listens on all interfaces, without authentication: whoever "
            "reaches its ports can write into and read from registered memory. Fence its network, say how in "
            "kv.network_fence and set tls.cert, tls.key and tls.ca; or set kv.allow_unauthenticated = true"
        ]
    return [
        f"{key}: {host} is not loopback, and gRPC without [tls] is plain text without authentication: set tls.cert, "
        "tls.key and tls.ca; or set kv.allow_unauthenticated = true"
    ]


def _is_fenced(config: Config) -> bool:
    return config.tls.is_complete and (not has_mooncake(config) or config.kv.network_fence is not None)


def _has_plane(config: Config) -> bool:
    """Whether KV leaves the workers' processes."""
    return config.mode == "disaggregated" or config.kv.store.is_shared


def has_kv_stream(config: Config) -> bool:
    """Whether KV comes to workers by gRPC, to each of their processes."""
    return config.mode == "disaggregated" and config.kv.transport == "grpc"


def has_mooncake(config: Config) -> bool:
    """Whether Mooncake listens on this machine: in workers, or in the store's client."""
    return workers_have_mooncake(config) or config.kv.store.is_shared


def _beyond_loopback(config: Config) -> tuple[str, str] | None:
    """(key, host) of the first that other machines may reach; a name other than localhost may mean anything."""
    client = config.kv.store.client if config.kv.store.is_shared else None
    hosts = {"worker.host": config.worker.host, "kv.host": config.kv.host, "kv.store.client": _host_of(client)}
    return next(((key, host) for key, host in hosts.items() if host and not is_loopback(host)), None)


def _host_of(address: str | None) -> str | None:
    """None also where it is no address, which is a fault of its own."""
    return None if address is None or not is_address(address) else address.rpartition(":")[0]
