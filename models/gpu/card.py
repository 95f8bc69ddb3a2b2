"""Whether this process's cards run the kernels, and what a kernel may count on there.

They are written for Hopper (sm_90a): warpgroups that multiply from shared memory, and copies that a barrier counts. On
another card, and for shapes that a kernel does not take, XLA's form of the same part serves, and the log says so once.
Ampere has neither, and Blackwell multiplies otherwise: what Mosaic GPU offers there (`mma` from jax 0.12 on, `tcgen05`)
would take other kernels.
"""

import functools
import logging

import jax

logger = logging.getLogger(__name__)

HOPPER = "9.0"
NUM_PROCESSORS = 132  # streaming multiprocessors of an H100 or H200, where no card can be asked

# What is not yet measured on a card does not serve on one, though it gives the same and does fewer products: what it
# loses in waiting is not known. `make bench-gpu` has a row of each beside what serves. `experts.packed_product` serves
# unmeasured: all else that there is for packed experts, XLA's loop, widens a whole expert in memory for each block.
ATTENDS_IN_PAIRS = False  # `attention.pairs` in place of `attention.tiles`
# `attention.expanded` in place of `attention.latent` for many queries of a sequence, and what it expands at once: bytes
# of keys and values, 8,192 tokens of K2.
EXPANDS_PROMPTS = False
PANEL_BYTES = 256 << 20


@functools.cache
def runs_kernels() -> bool:
    """Whether the devices of this process are Hopper cards. Says so where they are other GPUs, once a process."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return False
    found = str(getattr(device, "compute_capability", "unknown"))
    if found != HOPPER:
        say_once(f"{device.device_kind} has compute capability {found}, not {HOPPER}")
    return found == HOPPER


def num_processors() -> int:
    """Streaming multiprocessors of this process's card, or of an H100's: a wrong count makes work uneven, not wrong."""
    device = jax.devices()[0]
    return int(getattr(device, "core_count", NUM_PROCESSORS)) if device.platform == "gpu" else NUM_PROCESSORS


@functools.cache
def say_once(reason: str) -> None:
    """Why a kernel does not serve."""
    logger.warning("kernels for GPUs: %s; that part runs as XLA compiles it", reason)
