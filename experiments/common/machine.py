"""On what a benchmark ran: processors, memory, versions, commit. Numbers without these mean nothing."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("moonshard", "jax", "jaxlib", "numpy", "grpcio", "uvicorn", "uvloop")
ROOT = Path(__file__).resolve().parents[2]


def num_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def describe_machine() -> dict[str, object]:
    return {
        "cores": num_cores(),
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "load_average_before": os.getloadavg()[0],
    }


def describe_versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def describe_commit() -> str:
    """The commit of the checkout, with `+` for uncommitted changes to tracked files; "unknown" outside of one."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _field(path: str, name: str) -> str | None:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
