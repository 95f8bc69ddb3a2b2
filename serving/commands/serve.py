"""`moonshard serve`, and its parts that the demo uses too: the command lines of the children, the ready line."""

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from moonshard.rpc.addresses import host_port
from moonshard.serving.commands.checks.folders import check_model_folder
from moonshard.serving.commands.checks.nodes import node_faults, option_faults, plan_of
from moonshard.serving.commands.checks.ports import check_kv_ports_suffice, check_ports_are_free
from moonshard.serving.commands.checks.tiers import check_tiers_fit
from moonshard.serving.commands.options import Configured, optional_argument
from moonshard.serving.config.cluster_key import cluster_key
from moonshard.serving.config.keys import (
    Config,
    ConfigError,
    WorkerRole,
    command_of,
    mesh_of,
    processes_of,
    with_worker_at,
    workers_of,
)
from moonshard.serving.config.kv_ports import store_ports
from moonshard.serving.config.loopback import EVERYWHERE, LOOPBACK, is_loopback
from moonshard.serving.config.reading import as_overrides, toml_value
from moonshard.serving.config.tenants import load_tenants
from moonshard.serving.deploy.children.gpus import gpus_here, shared_out
from moonshard.serving.deploy.children.limits import limits_of
from moonshard.serving.deploy.children.supervisor import Command, launch_here, supervise
from moonshard.serving.deploy.on_ray.orders import KEY_FILE, NODE
from moonshard.serving.deploy.timings import Timings
from moonshard.serving.deploy.unblocked_output import unblocked_output
from moonshard.serving.entry import ended_by_interrupt
from moonshard.serving.store.ports import free_ports

if TYPE_CHECKING:
    from moonshard.serving.deploy.on_ray.launcher import RayPlan
    from moonshard.serving.deploy.terminal import TerminalReporter


def serve(
    options: Configured,
    model: Annotated[Path | None, tyro.conf.Positional, optional_argument("MODEL")] = None,
    port: Annotated[int | None, optional_argument("PORT")] = None,
    host: Annotated[str | None, optional_argument("HOST")] = None,
    mode: Annotated[Literal["aggregated", "disaggregated"] | None, optional_argument("MODE")] = None,
    launcher: Literal["local", "ray"] = "local",
    ray_address: Annotated[str | None, optional_argument("HOST:PORT")] = None,
    ray_device: Annotated[str | None, optional_argument("RESOURCE")] = None,
    timings: bool = False,
) -> int:
    """Serve a model: start the workers and a gateway, and keep them running.

    Prefill and decode workers, as prefill.replicas and decode.replicas say; with mode = "aggregated", decode.replicas
    workers that do both. Prints one line when everything is ready. SIGTERM or Ctrl-C lets running requests finish and
    then ends; a second Ctrl-C ends at once.

    Args:
        model: the checkpoint's folder (model.path); by default the embedded model.
        port: where HTTP listens (gateway.port); by default 8000.
        host: where HTTP and gRPC listen (gateway.host); by default 127.0.0.1, for this machine alone.
        mode: aggregated: workers do both; disaggregated, the default: prefill and decode apart (mode).
        launcher: where workers run: local: on this machine; ray: on nodes of a Ray cluster (the extra `ray`).
        ray_address: of the cluster, which this machine must be a node of; by default a Ray of its own is started here.
        ray_device: the resource of Ray, for example GPU, of which a worker takes one per device of its mesh. By default
            it takes as many CPUs.
        timings: once everything is ready, tell on stderr where the time went: the phases of each process's start.
    """
    own = Timings()
    own.note("interpreter", 0.0)
    begun_s = time.perf_counter()
    with ended_by_interrupt():
        from moonshard.serving.deploy.terminal import TerminalReporter

        config = replace(options, set=(*options.set, *_as_overrides(model, port, host, mode))).load()
        on_nodes = launcher == "ray"
        faults = [*option_faults(launcher, ray_address, ray_device), *(node_faults(config) if on_nodes else ())]
        if faults:
            raise ConfigError(faults)
        commands = ChildCommands(config, on_nodes=on_nodes)
        roles = workers_of(config).values()
        num_here = 1 if on_nodes else sum(processes_of(config, role) for role in roles)  # on a node at least one
        check_kv_ports_suffice(config, num_processes=num_here)
        check_ports_are_free(config)
        if not on_nodes:  # whose memory and disks are others
            check_tiers_fit(config, tuple(workers_of(config).values()))
        load_tenants(config.gateway.keys)  # so that a faulty file is known now, and not once the workers are ready
        cluster_key(config, os.environ)  # likewise
    reporter = TerminalReporter(has_timings=timings)
    own.note("configuration", own.phases[0].took_s)
    waiting_s = own.now_s

    def on_ready(listening: Mapping[str, object]) -> None:
        reporter.finish()
        own.note("children", waiting_s)
        reporter.show_timings(own.phases)
        sys.stdout.write(ready_line(config, listening, time.perf_counter() - begun_s) + "\n")
        sys.stdout.flush()

    with unblocked_output():  # at a terminal that somebody has stopped the children are looked after all the same
        try:
            check = partial(check_model_folder, config.model.path)
            begin = partial(supervise, commands, reporter, limits_of(config), on_ready=on_ready, check=check)
            if on_nodes:
                return asyncio.run(_on_nodes(plan_of(config, ray_address, ray_device), reporter, begin))
            return asyncio.run(begin(launch=partial(launch_here, environments=shared_out(commands.needs, gpus_here()))))
        finally:
            reporter.finish()


async def _on_nodes(plan: "RayPlan", reporter: "TerminalReporter", begin: Callable[..., Awaitable[int]]) -> int:
    """The exit code of `begin`, whose workers Ray places. ConfigError as `ray_launcher`."""
    from moonshard.serving.deploy.on_ray.launcher import ray_launcher

    reporter.event("ray", "progress", {"message": f"looking for {plan.address}" if plan.address else "starting"})
    async with ray_launcher(plan, partial(reporter.line, "ray")) as launcher:
        reporter.event("ray", "ready", {})
        return await begin(launch=launcher.launch)


def _as_overrides(model: Path | None, port: int | None, host: str | None, mode: str | None) -> list[str]:
    """What has a name of its own on this command line, as `--set` would say it."""
    named = {"model.path": model, "gateway.port": port, "gateway.host": host, "mode": mode}
    return [f"{key}={toml_value(value)}" for key, value in named.items() if value is not None]


def ready_line(config: Config, listening: Mapping[str, object], elapsed_s: float) -> str:
    urls = f"{listening['http']}/v1  grpc {listening['grpc']}"
    return f"moonshard ready in {elapsed_s:.1f} s: {urls}  model {config.model.name}"


class ChildCommands:
    """The command lines of the children. Each gets the whole configuration as `--set`, as a person could type it."""

    def __init__(self, config: Config, *, on_nodes: bool = False):
        """`on_nodes`: workers run on machines that are known once they are placed: `on_ray.orders` names them."""
        self._has_own_store = config.kv.store.is_shared and config.kv.store.client is None
        config = _with_store_here(config) if self._has_own_store else config
        self.config = _with_registry_here(config) if config.gateway.registry == "grpc" else config
        self._worker_host = NODE if on_nodes else LOOPBACK
        self._keeps_port = not on_nodes
        cluster = replace(config.cluster, key_file=Path(KEY_FILE)) if on_nodes else config.cluster
        self._worker_config = replace(self.config, cluster=cluster)

    @property
    def beside(self) -> dict[str, Command]:
        return {"store": lambda _: _argv("store", self.config)} if self._has_own_store else {}

    @property
    def workers(self) -> dict[str, Command]:
        return {name: partial(self.worker, role) for name, role in workers_of(self.config).items()}

    @property
    def needs(self) -> dict[str, int]:
        """How many devices each process of a worker has, by its name."""
        found = dict[str, int]()
        for name, role in workers_of(self.config).items():
            own = mesh_of(self.config, role).num_devices // processes_of(self.config, role)
            found |= dict.fromkeys((name, *self.followers(name, "")), own)
        return found

    def worker(self, role: WorkerRole, previous: Mapping[str, object] | None) -> list[str]:
        """A worker on a free port of its node; or here, on one of loopback, or on that of the process it replaces."""
        port = _port(previous["address"]) if previous and self._keeps_port else 0
        return _argv(command_of(role), with_worker_at(self._worker_config, role, self._worker_host, port))

    def followers(self, worker: str, address: str) -> dict[str, Command]:
        role = workers_of(self.config)[worker]
        return {
            f"{worker}.{index}": partial(self._follower, role, index, address)
            for index in range(1, processes_of(self.config, role))
        }

    def _follower(self, role: WorkerRole, index: int, leader: str, previous: Mapping[str, object] | None) -> list[str]:
        del previous  # nobody knows where it listens but by its leader
        there = with_worker_at(self._worker_config, role, self._worker_host, 0)
        return [*_argv(command_of(role), there), "--member", str(index), "--leader", leader]

    def gateway(self, workers: Sequence[str], previous: Mapping[str, object] | None) -> list[str]:
        listed = () if self.config.gateway.registry == "grpc" else tuple(workers)
        gateway = replace(self.config.gateway, workers=listed)
        if previous:
            gateway = replace(gateway, port=_port(previous["http"]), grpc_port=_port(previous["grpc"]))
        return _argv("gateway", replace(self.config, gateway=gateway))


def _argv(command: str, config: Config) -> list[str]:
    overrides = [argument for override in as_overrides(config) for argument in ("--set", override)]
    return [sys.executable, "-m", "moonshard.serving.cli", command, *overrides]


def _with_store_here(config: Config) -> Config:
    """Workers are told where they find the store before it is started, so that none of them has to wait for that."""
    [port, *_] = store_ports(config) or free_ports(1)
    client = host_port(config.kv.host or LOOPBACK, port)
    return replace(config, kv=replace(config.kv, store=replace(config.kv.store, client=client)))


def _with_registry_here(config: Config) -> Config:
    """Workers register with the gateway of `serve`, at a port that they know before it is started."""
    gateway = config.gateway
    is_everywhere = gateway.registry_host in EVERYWHERE
    if not is_everywhere and not is_loopback(gateway.registry_host):
        at = gateway.registry_host
        raise ConfigError(
            [f"gateway.registry_host: the workers of `serve` are at {LOOPBACK} and not at {at}; set 0.0.0.0"]
        )
    try:
        port = gateway.registry_port or free_ports(1)[0]
    except OSError as error:
        raise ConfigError([f"gateway.registry_port: {error}"]) from error
    host = LOOPBACK if is_everywhere else gateway.registry_host
    return replace(
        config,
        gateway=replace(gateway, registry_port=port),
        worker=replace(config.worker, gateways=(host_port(host, port),)),
    )


def _port(address: object) -> int:
    return int(str(address).rpartition(":")[2])
