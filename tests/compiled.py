"""What a test process compiles once, how well, and how it forgets it before it has too much of it.

The programs of a worker on 8 devices have memory mapped in thousands of pieces, and where Linux maps no more for the
process (vm.max_map_count, 65,530 pieces) XLA ends it. Without jax: who has not imported it has nothing to forget.
"""

import functools
import gc
import sys
from collections.abc import Callable, Mapping

LEVEL_FLAG = "--xla_backend_optimization_level"
UNOPTIMISED = f"{LEVEL_FLAG}=0"
MAX_MAPPINGS = 48_000  # and what one test may add
_caches: list[Callable[[], None]] = []


def as_users_have_it(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that is to compile as users' do, and not as tests do."""
    flags = " ".join(flag for flag in environ.get("XLA_FLAGS", "").split() if flag != UNOPTIMISED)
    return {**environ, "XLA_FLAGS": flags}


def compiled_once[**P, T](make: Callable[P, T]) -> Callable[P, T]:
    """`functools.cache` for what holds compiled programs: it is made anew once they were forgotten."""
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
