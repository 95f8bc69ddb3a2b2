"""A prompt cache that outlives workers and deployments: real processes, killed and started again over their files."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from shutil import disk_usage

import psutil
import pytest

from moonshard.rpc.types import Completion
from moonshard.serving.control.sampling_parameters import Sampling
from tests.agreement import assert_drawn_from, reference
from tests.cluster.conftest import AGGREGATED, BLOCK_BYTES, OVERRIDES, Cluster, running, wait_until
from tests.engine_room import long_text
from tests.kv.store.ssd.mounts import mounted
from tests.sizes import BLOCK_SIZE

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(300)]
PROMPTS = [long_text(length, seed=length) for length in (65, 150, 300, 500)]
NUM_BLOCKS = sum(len(prompt) // BLOCK_SIZE for prompt in PROMPTS)


def with_files(folder: Path, **more: object) -> dict[str, object]:
    key = folder / "cluster.key"
    files = {"kv.store.enabled": "true", "kv.store.ssd_path": folder / "kv", "kv.store.ssd_bytes": 64 * 1024**2}
    return {"cluster.key_file": key, "kv.store.host_bytes": 0, **files, **more}


def ask(cluster: Cluster, prompt: list[int]) -> Completion:
    with cluster.client() as client:
        return client.generate(prompt, temperature=0, max_tokens=20, ignore_eos=True)


def answers(cluster: Cluster) -> list[tuple[int, ...]]:
    found = [ask(cluster, prompt) for prompt in PROMPTS]
    for prompt, one in zip(PROMPTS, found, strict=True):
        assert_drawn_from(reference(), prompt, list(one.choices[0].token_ids), Sampling(temperature=0.0))
    return [one.choices[0].token_ids for one in found]


def assert_found_again(cluster: Cluster, before: list[tuple[int, ...]], tier: str = "ssd") -> None:
    """Not each of them: where computing so small a model seems faster than fetching, it is computed."""
    found = [ask(cluster, prompt) for prompt in PROMPTS]
    assert [one.choices[0].token_ids for one in found] == before
    for prompt, one in zip(PROMPTS, found, strict=True):
        assert one.usage.cached_tokens in (0, len(prompt) // BLOCK_SIZE * BLOCK_SIZE)
        assert sum(one.usage.cached_by_tier.values()) == one.usage.cached_tokens
        assert one.usage.cached_by_tier.keys() <= {tier}
    assert any(one.usage.cached_tokens for one in found)


def all_kept(cluster: Cluster) -> bool:
    return cluster.metric("moonshard_tier_kept_blocks_total", tier="ssd") >= NUM_BLOCKS


def test_a_killed_worker_and_a_new_deployment_find_prompts_again(tmp_path: Path):
    with running(**with_files(tmp_path), **AGGREGATED) as cluster:
        before = answers(cluster)
        assert wait_until(lambda: all_kept(cluster), 30)
        killed = cluster.pid("worker")
        os.kill(killed, signal.SIGKILL)
        assert wait_until(lambda: cluster.metric("moonshard_worker_up") == 0, 60)
        assert wait_until(lambda: cluster.metric("moonshard_worker_up") == 1, 120)
        assert_found_again(cluster, before)
    with running(**with_files(tmp_path)) as apart:  # which finds what the aggregated worker wrote
        assert_found_again(apart, before)
        with apart.http() as http:
            body = {"prompt": PROMPTS[0], "max_tokens": 2, "temperature": 0}
            usage = http.post("/v1/completions", json=body).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 64}  # on the device by now, however it came there


def test_what_waits_to_be_written_is_written_before_the_end(tmp_path: Path):
    with running(**with_files(tmp_path), **AGGREGATED) as cluster:
        before = answers(cluster)
    with running(**with_files(tmp_path), **AGGREGATED) as cluster:
        assert_found_again(cluster, before)


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
def test_bits_that_flipped_in_the_files_of_a_worker_change_no_answer(tmp_path: Path):
    with running(**with_files(tmp_path), **AGGREGATED) as cluster:
        before = answers(cluster)
        assert wait_until(lambda: all_kept(cluster), 30)
    (payload,) = tmp_path.glob("kv/prefill-0/*/payload")
    spoilt = bytearray(payload.read_bytes())
    for place in range(100, len(spoilt), 4096):  # in every block
        spoilt[place] ^= 1
    payload.write_bytes(spoilt)
    with running(**with_files(tmp_path), **AGGREGATED) as cluster:
        assert [ask(cluster, prompt).choices[0].token_ids for prompt in PROMPTS] == before
        assert cluster.metric("moonshard_cached_tokens_total", tier="ssd") == 0
        assert cluster.metric("moonshard_tier_misses_total", tier="ssd", cause="corrupt") > 0


def in_memory_that_all_share(folder: Path, **more: object) -> dict[str, object]:
    shared = {"kv.store.enabled": "true", "kv.store.host_bytes": 0, "kv.store.dram_bytes": 64 * 1024**2}
    return {"cluster.key_file": folder / "cluster.key", **shared, **more}


def all_shared(cluster: Cluster) -> bool:
    return cluster.metric("moonshard_tier_kept_blocks_total", tier="store") >= NUM_BLOCKS


def store_processes(cluster: Cluster) -> dict[str, psutil.Process]:
    children = psutil.Process(cluster.process.pid).children(recursive=True)
    return {child.name(): child for child in children if child.name().startswith("mooncake")}


def test_what_a_killed_worker_kept_in_mooncake_store_is_found_by_the_next(tmp_path: Path):
    with running(**in_memory_that_all_share(tmp_path), **AGGREGATED) as cluster:
        before = answers(cluster)
        assert wait_until(lambda: all_shared(cluster), 30)
        os.kill(cluster.pid("worker"), signal.SIGKILL)
        assert wait_until(lambda: cluster.metric("moonshard_worker_up") == 0, 60)
        assert wait_until(lambda: cluster.metric("moonshard_worker_up") == 1, 120)
        assert_found_again(cluster, before, tier="store")
        natives = store_processes(cluster)
        assert len(natives) == 2
    psutil.wait_procs(natives.values(), timeout=20)
    assert not any(native.is_running() for native in natives.values())


@pytest.mark.parametrize(
    ("which", "how"),
    [
        pytest.param("mooncake_master", signal.SIGKILL, id="master killed"),
        pytest.param("mooncake_client", signal.SIGSTOP, id="client stopped"),
        pytest.param("mooncake_client", signal.SIGKILL, id="client killed", marks=pytest.mark.slow),
        pytest.param("mooncake_master", signal.SIGSTOP, id="master stopped", marks=pytest.mark.slow),
    ],
)
def test_requests_are_served_while_mooncake_store_is_not(tmp_path: Path, which: str, how: int):
    with running(**in_memory_that_all_share(tmp_path), **AGGREGATED) as cluster:
        before = answers(cluster)
        native = store_processes(cluster)[which]
        native.send_signal(how)
        began_s = time.monotonic()
        assert [ask(cluster, prompt).choices[0].token_ids for prompt in PROMPTS] == before
        assert time.monotonic() - began_s < 10  # where nothing waits for the library, which waits for 30 s
        if how == signal.SIGSTOP:
            native.send_signal(signal.SIGCONT)
        else:
            assert wait_until(lambda: len(store_processes(cluster)) == 2, 60)
            assert native not in store_processes(cluster).values()


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
