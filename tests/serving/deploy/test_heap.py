"""What a process keeps for life is out of the collector's sight, garbage is not among it, and what is freed is gone."""

import gc
import platform
import subprocess
import sys
import weakref

import pytest

from moonshard.serving.deploy.heap import keep_for_life

FREE_BETWEEN = """
import os
import sys
from pathlib import Path

from moonshard.serving.deploy.heap import unmap_large_blocks_once_freed

def rss_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

if sys.argv[1] == "unmapped":
    unmap_large_blocks_once_freed()
bytearray(2 << 20)  # freed at once: from now on the C library would take such blocks out of its heap
before = rss_mb()
texts, kept = [], []
for _ in range(100):
    texts.append(bytearray(b"x" * (1 << 20)))
    kept.append([bytes(1000) for _ in range(20)])  # too long for Python's own arenas: they stand between the texts
del texts
print(rss_mb() - before)
"""
MAX_KEPT_MB = 20  # of 100
FROM_THREADS = """
import ctypes
import sys
import threading

from moonshard.serving.deploy.heap import share_one_arena

if sys.argv[1] == "one":
    share_one_arena()
all_work = threading.Barrier(4)

def work():
    all_work.wait()
    bytearray(100_000)
    all_work.wait()

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
ctypes.CDLL(None).malloc_stats()  # on stderr
"""


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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_large_blocks_that_are_freed_between_small_ones_are_the_systems_again():
    grown_mb = {
        how: float(subprocess.run([sys.executable, "-c", FREE_BETWEEN, how], capture_output=True, check=True).stdout)
        for how in ("kept", "unmapped")
    }
    assert grown_mb["unmapped"] < MAX_KEPT_MB < grown_mb["kept"]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_threads_take_memory_from_one_arena():
    said = {
        how: subprocess.run(
            [sys.executable, "-c", FROM_THREADS, how], capture_output=True, text=True, check=True
        ).stderr
        for how in ("one", "each")
    }
    assert said["one"].count("Arena") == 1
    assert said["each"].count("Arena") > 1
