"""How a process of moonshard begins and fails to begin: its event loop, its environment for jax, its start-up errors.

Start-up errors are the user's to mend (a bad folder, mesh, port or configuration): one message and exit code 2. They
have no common base, since the packages that raise them do not know each other. So a table lists them, by name and not
by class: comparing names imports nothing, and a class that was raised is loaded anyway.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from moonshard.serving.config.keys import Config
from moonshard.serving.deploy.heap import importing
from moonshard.serving.deploy.status_pipe import Status, StatusPrinter, open_status_pipe
from moonshard.serving.deploy.timings import Timings
from moonshard.serving.deploy.unblocked_output import unblocked_output
from moonshard.serving.observe.rows.schema import STARTS
from moonshard.sharding.shape import MeshShape

if TYPE_CHECKING:
    from moonshard.serving.observe.rows.recorder import Recorder

STARTUP_EXIT_CODE = 2
BEHIND_END_S = 0.2
LAST_STATUS_S = 1.0  # for a supervisor that has not read it yet: it may be stopped
PHASES_PER_EVENT = 200
# Names of threads that wait for XLA, which cannot be interrupted.
PREPARING, PREPARING_BEHIND = "prepare", "prepare behind"
STARTUP_ERRORS = frozenset(
    {
        ("moonshard.kv.transfer", "TransportUnavailable"),
        ("moonshard.models.folder.checkpoint", "CheckpointError"),
        ("moonshard.models.folder.generation", "GenerationConfigError"),
        ("moonshard.models.spec", "ModelError"),
        ("moonshard.models.tokenizers.vocabulary", "TokenizerError"),
        ("moonshard.rpc.server.server", "PortInUse"),
        ("moonshard.serving.chat.template", "TemplateFileError"),
        ("moonshard.serving.config.keys", "ConfigError"),
        ("moonshard.serving.gateway.records.accounts.ledger", "LedgerError"),
        ("moonshard.serving.config.tenants", "KeyFileError"),
        ("moonshard.sharding.rules", "MeshError"),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStart:
    """What a process brings with it from its command line."""

    timings: Timings
    programs: Path | None = None  # where compiled ones are kept


class RunProcess(Protocol):
    """What a process does, from its start to its exit code."""

    def __call__(self, config: Config, *, status: Status, start: ProcessStart) -> Coroutine[Any, Any, int]: ...


def run_process(run: Callable[[], RunProcess], config: Config, status_fd: int | None, start: ProcessStart) -> int:
    """Run a gateway or a worker on an event loop of its own; calling `run` imports it.

    Under a supervisor a start-up error goes into the status pipe, else it is raised.
    """
    with start.timings.phase("imports"), importing():
        import uvloop

        begin = run()
    with unblocked_output():
        return _run(lambda status: uvloop.run(begin(config, status=status, start=start)), status_fd)


def _run(serve: Callable[[Status], int], status_fd: int | None) -> int:
    if status_fd is None:
        return serve(StatusPrinter())
    status = open_status_pipe(status_fd)
    try:
        return serve(status)
    except (ValueError, OSError, ExceptionGroup) as error:
        message = startup_message(error)
        if message is None:
            raise
        status("failed", {"message": message, "exit_code": STARTUP_EXIT_CODE})
        return STARTUP_EXIT_CODE
    finally:
        status.finish(LAST_STATUS_S)


def end_process(code: int, *, at_once: bool = False) -> int:
    """The exit code; `at_once`, or where programs are still being prepared, the process ends with it here.

    All that matters is closed by then, and the interpreter would wait for XLA, for seconds and on a GPU for minutes; in
    a gang for members that are gone; with Mooncake Store its library, for 30 s, for a client that is stopped.
    """
    preparing = [thread for thread in threading.enumerate() if thread.name.startswith(PREPARING)]
    ends_s = time.monotonic() + BEHIND_END_S
    for thread in preparing:
        thread.join(max(0.0, ends_s - time.monotonic()))
    if at_once or any(thread.is_alive() for thread in preparing):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def tell_start(timings: Timings, status: Status, recorder: "Recorder | None", *, process: str, role: str) -> None:
    """Where the time of this start went: to whoever started the process, and into the recording."""
    told = timings.told()
    for first in range(0, len(told), PHASES_PER_EVENT):  # an event is a line of bounded length
        status("timings", {"timings": told[first : first + PHASES_PER_EVENT]})
    if recorder is not None:
        rows = recorder.rows(STARTS)
        for phase in timings.phases:
            rows.append((process, role, phase.name, phase.detail, phase.begun_s * 1e3, phase.took_s * 1e3))


def startup_message(error: BaseException) -> str | None:
    """What to tell the user of a start-up error, also of one among several failed tasks. None: it is our own fault."""
    if isinstance(error, BaseExceptionGroup):
        return next((text for inner in error.exceptions if (text := startup_message(inner))), None)
    if any((base.__module__, base.__qualname__) in STARTUP_ERRORS for base in type(error).__mro__):
        return str(error)
    return None


def jax_environment(mesh: MeshShape, environ: Mapping[str, str], num_processes: int = 1) -> dict[str, str]:
    """The variables to add to `environ` before jax is imported: a device per place in the mesh, a compile cache.

    `num_processes` have the mesh together, each as many of its devices.

    What the user has set stays. The devices are virtual and of the CPU; an accelerator's are what they are.
    """
    added = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # a tiny model's programs are worth keeping too
    flags = environ.get("XLA_FLAGS", "")
    num_devices = mesh.num_devices // num_processes
    if num_devices > 1 and "xla_force_host_platform_device_count" not in flags:
        added["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={num_devices}".strip()
    added["JAX_COMPILATION_CACHE_DIR"] = str(_cache_folder(environ) / "jax")
    return {name: value for name, value in added.items() if name == "XLA_FLAGS" or name not in environ}


def prepare_jax(mesh: MeshShape, num_processes: int = 1) -> None:
    """Set this process's environment for jax, which must not be imported yet."""
    os.environ.update(jax_environment(mesh, os.environ, num_processes))


def prepare_worker(mesh: MeshShape, num_processes: int = 1) -> Path | None:
    """As `prepare_jax`, for a worker. Returns the folder where its compiled programs are kept; None for nowhere.

    jax's own cache is not used: programs are kept whole, which is impossible for those that came out of that cache.
    """
    folder = programs_folder(os.environ)
    prepare_jax(mesh, num_processes)
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    return folder


def _cache_folder(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moonshard"


def programs_folder(environ: Mapping[str, str]) -> Path | None:
    """Where compiled programs are kept: beside jax's own where the user has said where these are. None: nowhere."""
    if environ.get("JAX_ENABLE_COMPILATION_CACHE", "").lower() in ("0", "false", "off", "no"):
        return None
    if (chosen := environ.get("JAX_COMPILATION_CACHE_DIR")) and "://" not in chosen:  # jax keeps also in buckets
        return Path(chosen) / "moonshard"
    return _cache_folder(environ) / "programs"
