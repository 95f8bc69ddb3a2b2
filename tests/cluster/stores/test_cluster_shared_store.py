"""Mooncake Store under a deployment: what it holds outlives a worker, and whatever happens to it costs hits alone."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import AGGREGATED, Cluster, running, wait_until
from tests.cluster.stored import NUM_BLOCKS, PROMPTS, answers, assert_found_again, num_kept, with_store
from tests.engine_room import long_text
from tests.serving.store.store_process import natives_of, running_store

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(300)]
OTHERS = [long_text(length, seed=1000 + length) for length in (65, 150, 300, 500)]
HANGING_S = 30.0  # as long as the library's calls do


def assert_found_in_store(cluster: Cluster, before: list[tuple[int, ...]]) -> None:
    """Once it answers: a worker is ready without waiting for it."""
    assert wait_until(lambda: cluster.metric("moonshard_tier_up", tier="store") == len(cluster.workers), 30)
    assert_found_again(cluster, before, "store")


def test_what_a_killed_worker_kept_is_found_by_the_next(tmp_path: Path):
    with running(**with_store(tmp_path, **{"kv.store.dram_bytes": 64 * 1024**2}), **AGGREGATED) as cluster:
        before = answers(cluster)
        assert wait_until(lambda: num_kept(cluster, "store") >= NUM_BLOCKS, 30)
        os.kill(cluster.pid("worker"), signal.SIGKILL)
        assert wait_until(lambda: cluster.metric("moonshard_worker_up") == 0, 60)
        assert wait_until(lambda: cluster.metric("moonshard_worker_up") == 1, 120)
        assert_found_in_store(cluster, before)
        natives = natives_of(cluster.process.pid)
        assert len(natives) == 2
    psutil.wait_procs(natives.values(), timeout=20)
    assert not any(native.is_running() for native in natives.values())


@pytest.mark.slow
def test_what_a_store_by_itself_holds_outlives_a_whole_deployment(tmp_path: Path):
    with running_store() as store:
        keys = with_store(tmp_path, **{"kv.store.client": store.address})
        with running(**keys, **AGGREGATED) as cluster:
            before = answers(cluster)
            assert not natives_of(cluster.process.pid)  # it starts none of its own
        with running(**keys) as cluster:
            assert_found_in_store(cluster, before)


@pytest.mark.slow
def test_a_deployment_whose_client_is_stopped_ends_without_waiting_for_it(tmp_path: Path):
    with running(**with_store(tmp_path, **{"kv.store.dram_bytes": 64 * 1024**2}), **AGGREGATED) as cluster:
        answers(cluster, PROMPTS[:1])
        assert wait_until(lambda: num_kept(cluster, "store") > 0, 30)  # so that its memory is mapped
        natives_of(cluster.process.pid)["mooncake_client"].send_signal(signal.SIGSTOP)
        answers(cluster, PROMPTS[1:])  # which are to be written yet
        cluster.process.send_signal(signal.SIGTERM)
        began_s = time.monotonic()
        assert cluster.process.wait(3 * HANGING_S) == 0
        assert time.monotonic() - began_s < HANGING_S / 2


@pytest.mark.parametrize(
    ("which", "how"),
    [
        pytest.param("mooncake_master", signal.SIGKILL, id="master killed"),
        pytest.param("mooncake_client", signal.SIGSTOP, id="client stopped"),
        pytest.param("mooncake_client", signal.SIGKILL, id="client killed", marks=pytest.mark.slow),
        pytest.param("mooncake_master", signal.SIGSTOP, id="master stopped", marks=pytest.mark.slow),
    ],
)
def test_prompts_are_answered_while_it_is_not_there_and_kept_once_it_is(tmp_path: Path, which: str, how: int):
    with running(**with_store(tmp_path, **{"kv.store.dram_bytes": 64 * 1024**2}), **AGGREGATED) as cluster:
        answers(cluster)
        assert wait_until(lambda: num_kept(cluster, "store") >= NUM_BLOCKS, 30)
        native = natives_of(cluster.process.pid)[which]
        native.send_signal(how)
        began_s = time.monotonic()
        answers(cluster, OTHERS)  # of which the store is asked
        assert time.monotonic() - began_s < HANGING_S / 3
        assert wait_until(lambda: cluster.metric("moonshard_tier_misses_total", tier="store") > 0, 30)
        before = num_kept(cluster, "store")
        if how == signal.SIGSTOP:
            native.send_signal(signal.SIGCONT)
        else:
            assert wait_until(lambda: len(natives_of(cluster.process.pid)) == 2, 60)
            assert native not in natives_of(cluster.process.pid).values()
        fresh = (long_text(100, seed=2000 + number) for number in range(10_000))
        assert wait_until(lambda: bool(answers(cluster, [next(fresh)])) and num_kept(cluster, "store") > before, 60)
        answers(cluster, PROMPTS)
