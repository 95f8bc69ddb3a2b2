"""What a notebook starts: a server for its cells, or the command that runs an experiment, as a process of its own.

A kernel has an event loop already, so that the runner cannot run inside of it. Nothing outlives the notebook, even
where its kernel is killed.
"""

import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.common.running.deployment import deployed
from moonshard.serving.config.reading import load_config
from moonshard.serving.deploy.children.tether import tethered

COMMAND = (sys.executable, "-m", "moonshard.experiments.command", "run")
SAYS_RUN = "run: "


@dataclass(frozen=True, eq=False, slots=True)
class StartedServer:
    """A server on free ports. It ends with `close`, or with this process."""

    http: str  # URL without a path
    grpc: str  # host:port
    model: str
    _processes: ExitStack = field(repr=False)

    def close(self) -> None:
        self._processes.close()


def start_server(*settings: str) -> StartedServer:
    """Starts a server of the embedded model, or as `settings` (`key=value`) say; it is ready when this returns.

    ConfigError for what is wrong with these, ServerFailed where it cannot start.
    """
    processes = ExitStack()
    server = processes.enter_context(deployed(load_config(None, settings), os.environ)).server
    return StartedServer(server.http, server.grpc, server.model, processes)


def run_experiment(folder: Path, *settings: str, out: Path = Path("results")) -> Path:
    """Runs `moonshard experiment run FOLDER --set ...`: the run's folder. ExperimentError with its output."""
    sets = [part for setting in settings for part in ("--set", setting)]
    argv = tethered([*COMMAND, str(folder), "--out", str(out), *sets])
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ExperimentError(done.stderr.strip() or f"it ended with code {done.returncode}")
    return next(Path(line.removeprefix(SAYS_RUN)) for line in done.stdout.splitlines() if line.startswith(SAYS_RUN))
