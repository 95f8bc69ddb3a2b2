"""`moonshard store`."""

import logging

from moonshard.serving.commands.options import Configured, StatusFd
from moonshard.serving.config.faults import kv_plane_note
from moonshard.serving.config.keys import ConfigError
from moonshard.serving.deploy.startup import ProcessStart, RunProcess, run_process
from moonshard.serving.deploy.timings import Timings

logger = logging.getLogger(__name__)


def store(options: Configured, status_fd: StatusFd = None) -> int:
    """Run only this machine's end of Mooncake Store, at kv.store.client: kv.store.dram_bytes of memory that all workers
    share, and that outlives them.
    """
    timings = Timings()
    timings.note("interpreter", 0.0)
    with timings.phase("configuration"):
        config = options.load()
        if not (config.kv.store.enabled and config.kv.store.dram_bytes):
            raise ConfigError(["kv.store.dram_bytes: with kv.store.enabled it says how much to hold; 0 is nothing"])
    if note := kv_plane_note(config):
        logger.warning(note)
    return run_process(_load, config, status_fd, ProcessStart(timings=timings))


def _load() -> RunProcess:
    from moonshard.serving.store.process import run_store

    return run_store
