"""What a test process compiles once, with which optimisation, and when it drops compiled programs again.

The programs of a worker on 8 devices have memory mapped in thousands of pieces, and where Linux maps no more for the
process (vm.max_map_count, 65,530 pieces) XLA ends it. Without jax: who has not imported it has nothing to forget.
"""

import functools
import gc
import os
import sys
from collections.abc import Callable

LEVEL_FLAG = "--xla_backend_optimization_level"
MAX_MAPPINGS = 48_000  # and what one test may add
_caches: list[Callable[[], None]] = []


def set_optimisation(*, is_enabled: bool) -> None:
    """Applies to all that is compiled after this call, unless XLA_FLAGS set the level."""
    if "jax" in sys.modules and LEVEL_FLAG not in os.environ.get("XLA_FLAGS", ""):
        sys.modules["jax"].config.update("jax_disable_most_optimizations", not is_enabled)


def compiled_once[**P, T](make: Callable[P, T]) -> Callable[P, T]:
    """`functools.cache` for what holds compiled programs; it is built anew after they were dropped."""
    cached = functools.cache(make)
    _caches.append(cached.cache_clear)
    return cached  # pyright: ignore[reportReturnType]


def forget_if_many() -> None:
    if "jax" in sys.modules and _num_mappings() > MAX_MAPPINGS:
        for clear in _caches:
            clear()
        sys.modules["jax"].clear_caches()
        gc.collect()


def _num_mappings() -> int:
    with open("/proc/self/maps", "rb") as lines:
        return sum(1 for _ in lines)
