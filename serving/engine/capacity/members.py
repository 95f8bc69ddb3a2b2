"""What the processes of one worker tell each other before they choose its sizes: all of them need the same.

By jax's coordination service, which they have met at: it needs no program, and there is none yet.
"""

from pathlib import Path

import jax
from jax._src import distributed

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # of a machine, whatever containers there are on it


def told_by_all(what: str, value: str, timeout_s: float) -> list[str]:
    """What each process says of something, in their order; all of them ask, once. Of a single process its own.

    Blocks; raises what jax does where one has not said it in time.
    """
    if jax.process_count() == 1:
        return [value]
    client = distributed.global_state.client
    assert client is not None  # as wherever there are several
    client.key_value_set(f"moonshard/{what}/{jax.process_index()}", value)
    names = (f"moonshard/{what}/{index}" for index in range(jax.process_count()))
    return [client.blocking_key_value_get(name, int(timeout_s * 1e3)) for name in names]


def share_here(timeout_s: float) -> float:
    """Which part of the worker's processes is on this machine, and with it of what lies on all its devices."""
    machines = told_by_all("machine", _machine(), timeout_s)
    return machines.count(_machine()) / len(machines)


def _machine() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""  # all are taken to be on one
