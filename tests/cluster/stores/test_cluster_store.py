"""A prompt cache that outlives workers and deployments: real processes, killed and started again over their files."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import disk_usage

import pytest

from tests.cluster.conftest import AGGREGATED, BLOCK_BYTES, OVERRIDES, Cluster, running, wait_until
from tests.cluster.stored import NUM_BLOCKS, PROMPTS, answers, ask, assert_found_again, num_kept, with_store
from tests.kv.store.ssd.mounts import mounted

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(300)]


def with_files(folder: Path, **more: object) -> dict[str, object]:
    return with_store(folder, **{"kv.store.ssd_path": folder / "kv", "kv.store.ssd_bytes": 64 * 1024**2, **more})


def kill_worker(cluster: Cluster) -> None:
    """Returns when the next one serves."""
    os.kill(cluster.pid("worker"), signal.SIGKILL)
    assert wait_until(lambda: cluster.metric("moonshard_worker_up") == 0, 60)
    assert wait_until(lambda: cluster.metric("moonshard_worker_up") == 1, 120)


def test_a_killed_worker_and_a_new_deployment_find_prompts_again(tmp_path: Path):
    with running(**with_files(tmp_path), **AGGREGATED) as cluster:
        before = answers(cluster)
        assert wait_until(lambda: num_kept(cluster, "ssd") >= NUM_BLOCKS, 30)
        kill_worker(cluster)
        assert_found_again(cluster, before, "ssd")
    with running(**with_files(tmp_path)) as apart:  # which finds what the aggregated worker wrote
        assert_found_again(apart, before, "ssd")
        with apart.http() as http:
            body = {"prompt": PROMPTS[0], "max_tokens": 2, "temperature": 0}
            usage = http.post("/v1/completions", json=body).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 64}  # on the device by now, however it came there


def test_what_waits_to_be_written_is_written_before_the_end(tmp_path: Path):
    with running(**with_files(tmp_path), **AGGREGATED) as cluster:
        before = answers(cluster)
    with running(**with_files(tmp_path), **AGGREGATED) as cluster:
        assert_found_again(cluster, before, "ssd")


@pytest.mark.slow
def test_a_disk_that_others_fill_costs_hits_and_nothing_else(tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted(disk, "size=24m"):
        sizes = {"kv.store.ssd_path": disk / "kv", "kv.store.ssd_bytes": 16 * 1024**2}
        with running(**with_files(tmp_path, **sizes), **AGGREGATED) as cluster:
            (disk / "others").write_bytes(bytes(disk_usage(disk).free - 64 * 1024))
            before = answers(cluster)
            assert wait_until(lambda: cluster.metric("moonshard_tier_not_kept_blocks_total", tier="ssd") > 0, 30)
            assert answers(cluster) == before
            (disk / "others").unlink()
        with running(**with_files(tmp_path, **sizes), **AGGREGATED) as cluster:
            assert answers(cluster) == before
            assert wait_until(lambda: cluster.metric("moonshard_tier_held_bytes") >= NUM_BLOCKS * BLOCK_BYTES, 30)


@pytest.mark.slow
def test_a_worker_that_comes_back_to_a_disk_that_others_filled_serves(tmp_path: Path):
    """What it had written it finds; and where the disk takes no file any more, it serves without."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted(disk, "size=24m"):
        sizes = {"kv.store.ssd_path": disk / "kv", "kv.store.ssd_bytes": 16 * 1024**2}
        with running(**with_files(tmp_path, **sizes), **AGGREGATED) as cluster:
            before = answers(cluster)
            assert wait_until(lambda: num_kept(cluster, "ssd") >= NUM_BLOCKS, 30)
            (disk / "others").write_bytes(bytes(disk_usage(disk).free))
            kill_worker(cluster)
            assert_found_again(cluster, before, "ssd")
            with mounted(disk, "size=1m,ro"):
                kill_worker(cluster)
                assert answers(cluster) == before


@pytest.mark.slow
def test_bits_that_flipped_in_the_files_of_a_worker_change_no_answer(tmp_path: Path):
    with running(**with_files(tmp_path), **AGGREGATED) as cluster:
        before = answers(cluster)
        assert wait_until(lambda: num_kept(cluster, "ssd") >= NUM_BLOCKS, 30)
    (payload,) = tmp_path.glob("kv/prefill-0/*/payload")
    spoilt = bytearray(payload.read_bytes())
    for place in range(100, len(spoilt), 4096):  # in every block
        spoilt[place] ^= 1
    payload.write_bytes(spoilt)
    with running(**with_files(tmp_path), **AGGREGATED) as cluster:
        assert [ask(cluster, prompt).choices[0].token_ids for prompt in PROMPTS] == before
        assert cluster.metric("moonshard_cached_tokens_total", tier="ssd") == 0
        assert cluster.metric("moonshard_tier_misses_total", tier="ssd", cause="corrupt") > 0


def stranger(folder: Path) -> dict[str, object]:
    (folder / "kv/prefill-0").mkdir(parents=True)
    (folder / "kv/prefill-0/thesis.txt").write_text("not ours")
    return {}


def a_file(folder: Path) -> dict[str, object]:
    (folder / "kv").write_text("a file")
    return {}


@pytest.mark.parametrize(
    ("prepare", "key"),
    [
        (a_file, "kv.store.ssd_path"),
        (stranger, "kv.store.ssd_path"),
        (lambda folder: {"kv.store.ssd_bytes": 2**50}, "kv.store.ssd_bytes"),
        (lambda folder: {"kv.store.ssd_bytes": 100}, "kv.store.ssd_bytes"),
        (lambda folder: {"kv.store.host_bytes": 2**50}, "kv.store.host_bytes"),
        (lambda folder: {"kv.store.dram_bytes": 2**50}, "kv.store.dram_bytes"),
        (lambda folder: {"kv.store.dram_bytes": 100}, "kv.store.dram_bytes"),
    ],
    ids=[
        "a file",
        "a stranger's",
        "beyond the disk",
        "less than a block",
        "beyond memory",
        "beyond memory that is shared",
        "less than blocks that are shared",
    ],
)
def test_what_cannot_be_had_ends_the_start_by_its_key(
    tmp_path: Path, prepare: Callable[[Path], dict[str, object]], key: str
):
    more = prepare(tmp_path)
    argv = [sys.executable, "-m", "moonshard.serving.cli", "serve"]
    for name, value in {**OVERRIDES, **with_files(tmp_path), **AGGREGATED, **more}.items():
        argv += ["--set", f"{name}={value}"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert key in ended.stderr
