"""Gangs keep KV beyond their devices' pages: each member what its devices have, and prompts are found again there."""

import os
import signal
from pathlib import Path

import pytest

from tests.cluster.conftest import AGGREGATED, Cluster, running, wait_until
from tests.cluster.stored import NUM_BLOCKS, answers, assert_found_again, num_kept, with_store
from tests.cluster.stores.test_cluster_shared_store import assert_found_in_store
from tests.serving.store.store_process import running_store

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(600)]
GANG = {"decode.processes": 2, "worker.gang_timeout_s": 2.0}
OF_DATA = {**AGGREGATED, **GANG, "decode.mesh.data": 2}


def kill(cluster: Cluster, role: str, num_workers: int) -> None:
    """A worker, with all its members; until it is back."""
    os.kill(cluster.pid(role), signal.SIGKILL)
    assert wait_until(lambda: cluster.metric("moonshard_worker_up") == num_workers - 1, 60)
    assert wait_until(lambda: cluster.metric("moonshard_worker_up") == num_workers, 120)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"decode.mesh.data": 2}, id="data 2"),
        pytest.param({"decode.mesh.data": 2, "decode.mesh.tensor": 2}, id="data 2 tensor 2", marks=pytest.mark.slow),
        pytest.param({"decode.mesh.expert": 4}, id="expert 4", marks=pytest.mark.slow),
    ],
)
def test_what_a_killed_gang_kept_is_found_in_the_files_of_its_members(tmp_path: Path, mesh: dict[str, int]):
    files = tmp_path / "files"
    with running(**with_store(tmp_path, **{"kv.store.ssd_path": files}), **AGGREGATED, **GANG, **mesh) as cluster:
        before = answers(cluster)
        assert wait_until(lambda: num_kept(cluster, "ssd") >= NUM_BLOCKS, 60)
        assert {folder.name for folder in files.iterdir()} >= {"prefill-0", "prefill-1"}
        kill(cluster, "worker", num_workers=1)
        assert_found_again(cluster, before, "ssd")


@pytest.mark.slow
def test_a_gang_and_a_worker_of_another_mesh_find_each_others_blocks_in_a_shared_store(tmp_path: Path):
    with running_store() as store:
        keys = with_store(tmp_path, **{"kv.store.client": store.address})
        alone = {**AGGREGATED, "decode.mesh.tensor": 2}
        before: list[tuple[int, ...]] = []
        for arranged in (OF_DATA, alone, OF_DATA):
            with running(**keys, **arranged) as cluster:
                if before:
                    assert_found_in_store(cluster, before)
                    continue
                before = answers(cluster)
                assert wait_until(lambda: num_kept(cluster, "store") >= NUM_BLOCKS, 60)


@pytest.mark.slow
def test_gangs_that_hand_over_find_prompts_again_in_their_members_files(tmp_path: Path):
    gangs = {**GANG, "prefill.processes": 2, "prefill.mesh.data": 2, "decode.mesh.tensor": 2}
    stored = with_store(tmp_path, **{"kv.store.ssd_path": tmp_path / "files"})
    with running(**stored, **{**gangs, "decode.mesh.data": 2}) as cluster:
        before = answers(cluster)
        assert wait_until(lambda: num_kept(cluster, "ssd") >= NUM_BLOCKS, 60)
        kill(cluster, "prefill", num_workers=2)
        assert_found_again(cluster, before, "ssd")
