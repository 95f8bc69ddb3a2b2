"""Small file systems in memory, for disks that are full or read-only."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(path: Path, options: str) -> Iterator[None]:
    """Skips the test where that is not permitted."""
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip(f"cannot mount: {mount.stderr.decode(errors='replace').strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)
