"""Which member of which gang a process is, what all members must have alike, and how their devices become one mesh."""

import hashlib
import os
import sys
from dataclasses import dataclass, replace

from moonshard.serving.config.keys import Config, ConfigError, WorkerRole, mesh_of, processes_of
from moonshard.serving.config.loopback import EVERYWHERE
from moonshard.serving.config.reading import as_overrides

THIS_MACHINES = "this machine's"


@dataclass(frozen=True, slots=True)
class Member:
    """Of a worker of `num_members` processes the `index`-th; 0 leads, at `leader` (host:port) for the others."""

    index: int
    num_members: int
    leader: str | None = None

    @property
    def leads(self) -> bool:
        return self.index == 0


def member_of(config: Config, role: WorkerRole, index: int, leader: str | None) -> Member:
    """ConfigError for a member that the configured gang does not have."""
    num_members = processes_of(config, role)
    if not 0 <= index < num_members:
        key = "prefill" if role == "prefill" else "decode"
        raise ConfigError([f"--member {index}: {key}.processes is {num_members}; the last member is {num_members - 1}"])
    if (leader is None) != (index == 0):
        raise ConfigError(
            ["--leader: member 0 has none" if leader else f"--leader: where member {index} finds member 0"]
        )
    return Member(index, num_members, leader)


def num_drawing(config: Config, role: WorkerRole) -> int:
    """How many members draw tokens: the first ones, which have the last stage (`sharding.mesh.build_mesh`)."""
    return max(1, processes_of(config, role) // mesh_of(config, role).pipe)


def made_of(config: Config, role: WorkerRole) -> dict[str, str]:
    """What all members of a gang must have alike, by its name in words. Reads the header of the checkpoint.

    Raises what opening a checkpoint raises.
    """
    from moonshard.models.folder.checkpoint import Checkpoint
    from moonshard.serving.engine.compiled.digest import source_digest

    return {
        "role": role,
        "version of the code": source_digest(),
        "configuration": _digest("\n".join(as_overrides(_shared(config)))),
        "checkpoint": Checkpoint.open(config.model.path).fingerprint,
    }


def _shared(config: Config) -> Config:
    """Without what says only where a process is, and to whom its leader tells that."""
    worker = replace(config.worker, host="", port=0, gateways=(), announced_host=None)
    prefill, decode = replace(config.prefill, port=0), replace(config.decode, port=0)
    cluster = replace(config.cluster, key_file=None)  # who joins has proved that it has the same key
    client = None if config.kv.store.client is None else THIS_MACHINES
    kv = replace(config.kv, host=None, store=replace(config.kv.store, client=client))
    return replace(config, worker=worker, prefill=prefill, decode=decode, cluster=cluster, kv=kv)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def meet(coordinator: str, member: Member, host: str, *, timeout_s: float) -> None:
    """Makes the devices of all members one process's to jax, which must not have looked for any yet.

    Blocks until all are there. The coordination service runs in the leader, whose end is the gang's anyway: killed, it
    ends all others' runtimes 0.2 s later, and a killed follower nobody's; with the service in a process of its own,
    nobody's runtime ended within 40 s of either (measured, 2 processes, jax 0.12). Members are watched by us, which is
    sooner than jax would notice. `host` is this member's name or address, at which alone it listens to the others.
    GangFault where it does not come about.
    """
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from us
    is_anywhere = host in EVERYWHERE
    try:
        jax.distributed.initialize(
            coordinator,
            member.num_members,
            member.index,
            initialization_timeout=max(1, int(timeout_s)),
            coordinator_bind_address=None if is_anywhere else coordinator,  # jax's own choice: everywhere
        )
    except RuntimeError as error:
        raise GangFault(f"the members of the gang do not meet at {coordinator}: {error}") from error
    if not is_anywhere:
        _take_collectives_at(host)


def _take_collectives_at(host: str) -> None:
    """Of CPUs. By themselves they are at the address of the machine's own name, which on many machines is loopback's:
    members on others would call it in vain. jax has no setting for that, but takes a backend of somebody else's making.
    """
    from jax._src import distributed
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.xla_bridge import make_cpu_client
    from jax.extend.backend import register_backend_factory

    def make() -> object:
        client = distributed.global_state.client
        return make_cpu_client(_jax.make_gloo_tcp_collectives(distributed_client=client, hostname=host))

    register_backend_factory("cpu", make, priority=0, fail_quietly=False)


class GangFault(Exception):
    """The gang cannot go on, and no member of it."""


def end_at_once(code: int, message: str = "") -> None:
    """Ends the process whatever its threads wait for: a collective that a member is missing from is never done."""
    if message:
        sys.stderr.write(f"moonshard: {message}\n")
        sys.stderr.flush()
    os._exit(code)
