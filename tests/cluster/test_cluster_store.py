"""A prompt cache that outlives workers and deployments: real processes, killed and started again over their files."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moonshard.rpc.types import Completion
from moonshard.serving.control.sampling_parameters import Sampling
from tests.agreement import assert_drawn_from, reference
from tests.cluster.conftest import AGGREGATED, OVERRIDES, Cluster, running, wait_until
from tests.engine_room import long_text
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


def assert_found_again(cluster: Cluster, before: list[tuple[int, ...]]) -> None:
    """Not each of them: where computing so small a model seems faster than fetching, it is computed."""
    found = [ask(cluster, prompt) for prompt in PROMPTS]
    assert [one.choices[0].token_ids for one in found] == before
    for prompt, one in zip(PROMPTS, found, strict=True):
        assert one.usage.cached_tokens in (0, len(prompt) // BLOCK_SIZE * BLOCK_SIZE)
        assert sum(one.usage.cached_by_tier.values()) == one.usage.cached_tokens
        assert one.usage.cached_by_tier.keys() <= {"ssd"}
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
    ],
    ids=["a file", "a stranger's", "beyond the disk", "less than a block", "beyond memory"],
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
