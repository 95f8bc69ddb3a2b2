"""What a process keeps for life is out of the collector's sight, garbage is not among it, and what is freed is gone."""

import gc
import platform
import subprocess
import sys
import weakref

import pytest

from moonshard.serving.heap import keep_for_life


class Node:
    def __init__(self) -> None:
        self.itself = self  # a cycle, which only the collector ends


def test_what_lives_is_not_looked_through_again_and_what_is_garbage_goes():
    node, garbage = Node(), weakref.ref(Node())
    try:
        keep_for_life()
        assert garbage() is None
        assert node not in gc.get_objects()
        later = Node()
        assert later in gc.get_objects()
    finally:
        gc.unfreeze()


FREE_BETWEEN = """
import sys
from pathlib import Path
from moonshard.serving.heap import return_large_blocks

def rss_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

if sys.argv[1] == "returned":
    return_large_blocks()
bytearray(2 << 20)
before = rss_mb()
texts, kept = [], []
for _ in range(100):
    texts.append(bytearray(b"x" * (1 << 20)))
    kept.append([bytes(1000) for _ in range(20)])
del texts
print(rss_mb() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_large_blocks_that_are_freed_between_small_ones_are_the_systems_again():
    grown = {
        how: float(subprocess.run([sys.executable, "-c", FREE_BETWEEN, how], capture_output=True, check=True).stdout)
        for how in ("kept", "returned")
    }
    assert grown["returned"] < 20 < grown["kept"]
