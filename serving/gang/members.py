"""Which member of which gang a process is, what all members must have alike, and how their devices become one mesh."""

import atexit
import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from moonshard.rpc.addresses import is_address
from moonshard.serving.config.keys import Config, ConfigError, WorkerRole, mesh_of, processes_of
from moonshard.serving.config.loopback import EVERYWHERE, is_loopback
from moonshard.serving.config.reading import as_overrides

if TYPE_CHECKING:  # which needs jax
    from moonshard.serving.engine.loading.model import LoadedModel

CODE = ("kv", "models", "rpc", "serving", "sharding")  # packages
SHARED = frozenset(
    {"mode", "model", "worker", "prefill", "decode", "kv", "speculation"}
)  # a gateway alone has the rest
OWN = frozenset(
    {
        *(
            "model.path",
            "model.name",
            "speculation.path",
            "prefill.expert_loads",
            "decode.expert_loads",
        ),  # what is there is compared
        *("worker.host", "worker.port", "worker.gateways", "worker.announced_host", "prefill.port", "decode.port"),
        *("kv.host", "kv.ports", "kv.network_fence", "kv.allow_unauthenticated"),
    }
)


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
    """ConfigError for a member that the configured gang does not have, or that others would not reach."""
    num_members = processes_of(config, role)
    if not 0 <= index < num_members:
        key = "prefill" if role == "prefill" else "decode"
        raise ConfigError([f"--member {index}: {key}.processes is {num_members}; the last member is {num_members - 1}"])
    if (leader is None) != (index == 0):
        raise ConfigError(
            ["--leader: member 0 has none" if leader else f"--leader: where member {index} finds member 0"]
        )
    if leader is not None and not is_address(leader):
        raise ConfigError([f"--leader: expected host:port, got {leader!r}"])
    if num_members > 1:
        _check_host(config.worker.host, leader)
    return Member(index, num_members, leader)


def _check_host(host: str, leader: str | None) -> None:
    """ConfigError where the other members would call this one in vain."""
    if host in EVERYWHERE:
        raise ConfigError([f"worker.host: members of a gang call each other, and nobody at {host}; name one address"])
    if leader is not None and is_loopback(host) and not is_loopback(leader.rpartition(":")[0].strip("[]")):
        raise ConfigError([f"worker.host: {leader} may be another machine, which reaches no member at {host}"])


def num_drawing(config: Config, role: WorkerRole) -> int:
    """How many members draw tokens: the first ones, which have the last stage (`sharding.mesh.build_mesh`)."""
    return max(1, processes_of(config, role) // mesh_of(config, role).pipe)


def made_of(config: Config, role: WorkerRole) -> dict[str, str]:
    """What all members of a gang must have alike, by its name in words or its key. Reads the headers of checkpoints.

    Raises what opening a checkpoint raises, and ConfigError for a file that is not there.
    """
    from moonshard.models.folder.checkpoint import Checkpoint

    draft = config.speculation.path
    section = "prefill" if role == "prefill" else "decode"
    loads = config.prefill.expert_loads if role == "prefill" else config.decode.expert_loads
    return {
        "role": role,
        "version of the code": _digest_of_code(),
        "version of jax": f"{version('jax')}, {version('jaxlib')}",
        "checkpoint": Checkpoint.open(config.model.path).fingerprint,
        "draft model": "" if draft is None else Checkpoint.open(draft).fingerprint,
        "expert loads": "" if loads is None else _digest_of_file(f"{section}.expert_loads", loads),
        **_settings(config),
    }


def loaded_as(model: "LoadedModel") -> dict[str, str]:
    """What members that have loaded must have alike: the sizes of all that they compute, and what computes it."""
    return {
        "number of blocks": str(model.pool.blocks_per_partition),
        "sizes of steps": repr(model.shapes),
        "dtype": model.dtype,
        "kernels": repr(model.kernels),
        "fingerprint": model.fingerprint,
    }


def unlike(own: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """In what another member differs, in words; None where it does not. Of keys their values are told too."""
    names = sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name))
    if not names:
        return None
    words = (f"{name} ({theirs.get(name)} instead of {own.get(name)})" if "." in name else name for name in names)
    return f"another {', another '.join(words)}"


def _settings(config: Config) -> dict[str, str]:
    """What the configuration has workers do, by its keys, without what says where a process or one of its files is."""
    told = (override.partition("=") for override in as_overrides(config))
    found = {key: value for key, _, value in told if key.partition(".")[0] in SHARED and key not in OWN}
    tiers = config.kv.store
    return found | {"kv.store.client": str(tiers.client is not None), "kv.store.ssd_path": str(bool(tiers.ssd_path))}


def _digest_of_code() -> str:
    """Of all that a worker may run, by content and name alone, so that it is the same in every clone."""
    digest = hashlib.sha256()
    for name in CODE:
        folder = Path(str(import_module(f"moonshard.{name}").__file__)).parent
        for path in sorted(folder.rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{name} {path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _digest_of_file(key: str, path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError([f"{key}: {path}: {error.strerror}"]) from error


def meet(coordinator: str, member: Member, host: str, *, timeout_s: float) -> None:
    """Makes the devices of all members one process's to jax, which must not have looked for any yet.

    Blocks until all are there. The coordination service runs in the leader, whose end is the gang's anyway: killed, it
    ends all others' runtimes 0.2 s later, and a killed follower nobody's; with the service in a process of its own,
    nobody's runtime ended within 40 s of either (measured, 2 processes, jax 0.12). Members are watched by us, which is
    sooner than jax would notice. `host` is this member's name or address, at which alone it listens to the others.
    GangFault where it does not come about.
    """
    import jax
    from jax._src.api import clean_up

    atexit.unregister(clean_up)  # it would wait for members that are gone, for minutes
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from us
    try:
        jax.distributed.initialize(
            coordinator,
            member.num_members,
            member.index,
            initialization_timeout=max(1, int(timeout_s)),
            coordinator_bind_address=coordinator,  # by itself everywhere
        )
    except RuntimeError as error:
        raise GangFault(f"the members of the gang do not meet at {coordinator}: {error}") from error
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


def end_at_once(code: int, message: str = "") -> NoReturn:
    """Ends the process whatever its threads wait for: a collective that a member is missing from is never done."""
    if message:
        sys.stderr.write(f"moonshard: {message}\n")
        sys.stderr.flush()
    os._exit(code)
