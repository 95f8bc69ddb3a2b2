"""What this machine's processors reach: reading memory, and a float32 product. `python -m` prints them as JSON.

Memory is read by a thread on each core, each its part of an array that no cache holds, through numpy's integer
reductions, which do next to nothing else. A product's rate is the better of numpy's BLAS and XLA's. Both are the best
of several tries: a ceiling is what was reached once.
In a process of its own, so that nothing of it stays with the one that measures.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np

from moonshard.experiments.bench.floors.work import Ceilings
from moonshard.experiments.common.machine import num_cores

READ_BYTES = 512 << 20
SIDE = 2048
TRIES = 9


def measure_in_process(environment: Mapping[str, str]) -> Ceilings:
    """Both, by a process that ends afterwards. CalledProcessError where it fails."""
    argv = [sys.executable, "-m", "moonshard.experiments.bench.floors.ceilings"]
    ran = subprocess.run(argv, stdout=subprocess.PIPE, env=dict(environment), check=True)
    return msgspec.json.decode(ran.stdout, type=Ceilings)


def read_bytes_per_s(num_bytes: int = READ_BYTES, tries: int = TRIES) -> float:
    parts = np.array_split(np.ones(num_bytes // 8, np.uint64), num_cores())
    with ThreadPoolExecutor(len(parts)) as pool:
        return num_bytes / _best_s(lambda: list(pool.map(np.bitwise_or.reduce, parts)), tries)


def matmul_flops_per_s(side: int = SIDE, tries: int = TRIES) -> float:
    import jax  # the process that only reads rates has no need of it

    left, right = (np.random.default_rng(seed).standard_normal((side, side), np.float32) for seed in range(2))
    on_device, product = [jax.device_put(each) for each in (left, right)], jax.jit(lambda a, b: a @ b)
    seconds = (
        _best_s(lambda: left @ right, tries),
        _best_s(lambda: jax.block_until_ready(product(*on_device)), tries),
    )
    return 2 * side**3 / min(seconds)


def _best_s(call: Callable[[], Any], tries: int) -> float:
    """The first call warms up."""
    times_s = []
    for _ in range(tries + 1):
        begun_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - begun_s)
    return min(times_s[1:])


def main() -> None:
    found = Ceilings(bytes_per_s=read_bytes_per_s(), matmul_flops_per_s=matmul_flops_per_s())
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
