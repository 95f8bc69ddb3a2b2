"""What jax is told before anything imports it: eight CPU devices, and a cache of compilations kept between runs.

It is told through the environment, so that processes started by tests are told the same. A caller's own settings win.
So does where the cluster's key is kept: all that tests start has one, and it is not the user's.
Hypothesis is told that no example has a deadline: on a shared machine that would measure the neighbours. Where `CI` is
set its examples are the same in every run, so that a failure there is due to the change; all other runs look for more.
Tests marked `unoptimised` compile more than they run, so XLA optimises nothing for them. What holds for one order of
instructions holds for another; where it does not, `make test-slow` finds it, which compiles them as users do.
Tests that interrupt a run, their own or one that they started, mean one in the foreground, wherever they run.
"""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import settings

from tests.compiled import forget_if_many, set_optimisation

NUM_DEVICES = 8
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


def _prepare_jax() -> None:
    if "jax" in sys.modules:
        raise RuntimeError("jax was imported before tests/conftest.py could tell it its devices")
    flags = os.environ.get("XLA_FLAGS", "")
    if DEVICE_COUNT_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {DEVICE_COUNT_FLAG}={NUM_DEVICES}".strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".cache" / "jax"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def _heed_interrupts() -> None:
    """A shell lets what it runs in the background ignore SIGINT, and so would all that tests start."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_prepare_jax()
_heed_interrupts()
os.environ.setdefault("XDG_STATE_HOME", str(Path(__file__).parent.parent / ".cache" / "state"))
settings.register_profile("moonshard", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("moonshard")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of what compiles, each file is a group: all of it in one process would take longer than all else."""
    for item in items:
        if (mark := item.get_closest_marker("xdist_group")) and mark.args == ("jax",):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    set_optimisation(is_enabled=item.get_closest_marker("unoptimised") is None)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    if item.get_closest_marker("xdist_group"):  # others compile little, and to count takes milliseconds
        forget_if_many()
