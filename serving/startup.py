"""How a process of moonshard begins and fails to begin: its event loop, its environment for jax, its start-up errors.

Start-up errors are the user's to mend (a bad folder, mesh, port or configuration): one message and exit code 2. They
have no common base, since the packages that raise them do not know each other. So a table lists them, by name and not
by class: comparing names imports nothing, and a class that was raised is loaded anyway.
"""

import os
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Protocol

from moonshard.serving.config import Config
from moonshard.serving.status_pipe import Status, StatusPrinter, open_status_pipe
from moonshard.sharding.shape import MeshShape

STARTUP_EXIT_CODE = 2
STARTUP_ERRORS = frozenset(
    {
        ("moonshard.kv.transfer", "TransportUnavailable"),
        ("moonshard.models.checkpoint", "CheckpointError"),
        ("moonshard.models.generation", "GenerationConfigError"),
        ("moonshard.models.spec", "ModelError"),
        ("moonshard.models.vocabulary", "TokenizerError"),
        ("moonshard.rpc.server", "PortInUse"),
        ("moonshard.serving.chat", "TemplateFileError"),
        ("moonshard.serving.config", "ConfigError"),
        ("moonshard.serving.ledger", "LedgerError"),
        ("moonshard.serving.tenants", "KeyFileError"),
        ("moonshard.sharding.rules", "MeshError"),
    }
)


class RunProcess(Protocol):
    """What a process does, from its start to its exit code."""

    def __call__(self, config: Config, *, status: Status) -> Coroutine[Any, Any, int]: ...


def run_process(run: Callable[[], RunProcess], config: Config, status_fd: int | None) -> int:
    """Run a gateway or a worker on an event loop of its own; calling `run` imports it.

    Under a supervisor a start-up error goes into the status pipe, else it is raised.
    """
    import uvloop

    if status_fd is None:
        return uvloop.run(run()(config, status=StatusPrinter()))
    status = open_status_pipe(status_fd)
    try:
        return uvloop.run(run()(config, status=status))
    except (ValueError, OSError, ExceptionGroup) as error:
        message = startup_message(error)
        if message is None:
            raise
        status("failed", {"message": message, "exit_code": STARTUP_EXIT_CODE})
        return STARTUP_EXIT_CODE


def startup_message(error: BaseException) -> str | None:
    """What to tell the user of a start-up error, also of one among several failed tasks. None: it is our own fault."""
    if isinstance(error, BaseExceptionGroup):
        return next((text for inner in error.exceptions if (text := startup_message(inner))), None)
    if any((base.__module__, base.__qualname__) in STARTUP_ERRORS for base in type(error).__mro__):
        return str(error)
    return None


def jax_environment(mesh: MeshShape, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to add to `environ` before jax is imported: a device per place in the mesh, a compile cache.

    What the user has set stays. The devices are virtual and of the CPU; an accelerator's are what they are.
    """
    added = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # a tiny model's programs are worth keeping too
    flags = environ.get("XLA_FLAGS", "")
    if mesh.num_devices > 1 and "xla_force_host_platform_device_count" not in flags:
        added["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={mesh.num_devices}".strip()
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    added["JAX_COMPILATION_CACHE_DIR"] = str(cache / "moonshard" / "jax")
    return {name: value for name, value in added.items() if name == "XLA_FLAGS" or name not in environ}


def prepare_jax(mesh: MeshShape) -> None:
    """Set this process's environment for jax, which must not be imported yet."""
    os.environ.update(jax_environment(mesh, os.environ))
