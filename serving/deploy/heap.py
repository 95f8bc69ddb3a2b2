"""The heap of a process that serves: what it keeps for life, and what it gives back."""

import contextlib
import ctypes
import gc
from collections.abc import Iterator

LARGE_BLOCK_BYTES = 1 << 18  # bodies and their texts, and nothing that every token makes
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # malloc.h


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Imports within the block are not searched for garbage, neither meanwhile nor later: modules live for ever.

    The collector goes through all of them again and again while they become more: a fifth of what the imports take.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def keep_for_life() -> None:
    """Excludes all objects that exist now from garbage collection, and gives back what loading has freed. Called once,
    when all is loaded.

    Python's collector of reference cycles stops the process, and its oldest generation is everything that ever lived
    long: modules, tokenizer, compiled programs. With 256 streams it came every 2 s and took a gateway 35 to 55 ms, in
    which no token moved. After start-up nearly all of this is there for good.
    Source: vLLM, which freezes its heap after start-up for the same reason.
    """
    gc.collect()
    gc.freeze()
    give_back_freed()


def give_back_freed() -> None:
    """Returns to the system what malloc keeps of memory that was freed: after compiling, some hundred MB.

    Source: malloc_trim(3). Where the C library has none, nothing changes.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def share_one_arena() -> None:
    """From now on threads that begin take memory from an arena of malloc that exists. Called while there is only one.

    glibc gives each thread an arena of its own, until there are eight for each core, and what is freed in one is not
    reused in another. A step's temporary buffers are taken by whichever of XLA's threads comes to it: after prompts of
    4,000 tokens a worker was 90 MiB larger than with one arena, and no faster.
    Source: mallopt(3). Where the C library has no such setting nothing changes.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def unmap_large_blocks_once_freed() -> None:
    """From now on each large block of memory is mapped by itself, and returned to the system when it is freed.

    glibc does so from 128 KiB on, until the first such block is freed: from then on it takes blocks of that size out of
    its heap, which shrinks only at its end. After 150 texts of half a megabyte a gateway kept 210 MB in this way.
    Source: mallopt(3). Where the C library has no such setting, or refuses it, nothing changes.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
