"""Nobody can tell from the time to the first token what another tenant has asked before."""

import time
from pathlib import Path
from random import Random

import numpy as np
import pytest

from moonshard.rpc.client import Client
from moonshard.serving.config.tenants import hash_key
from tests.cluster.conftest import Cluster, running
from tests.sizes import BLOCK_SIZE

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.slow, pytest.mark.timeout(1800)]
NUM_PAIRS = 600  # with 200 an AUC of equal distributions has a standard error of 0.03
NUM_PROMPT = 1000
MAX_AUC = 0.55
VOCAB_SIZE = 1000
KEYS = {name: f"the key of {name}" for name in ("one", "other")}
NUM_FEW_BLOCKS = 2 * NUM_PROMPT // BLOCK_SIZE + 30  # two prompts, and what they generate
TIER_BYTES = 256 * 1024**2


def auc(faster: list[float], slower: list[float]) -> float:
    """The probability that one of the first is less than one of the second: 0.5 where they cannot be told apart."""
    first, second = np.array(faster)[:, None], np.array(slower)[None, :]
    return float(((first < second) + 0.5 * (first == second)).mean())


def ttft_s(client: Client, prompt: list[int], key: str) -> float:
    start_s = time.perf_counter()
    with client.stream(
        prompt, max_tokens=2, temperature=0.0, ignore_eos=True, metadata=(("authorization", f"Bearer {key}"),)
    ) as stream:
        next(iter(stream))
        first_s = time.perf_counter()
        for _ in stream:
            pass
    return first_s - start_s


def test_a_prompt_that_another_tenant_has_asked_is_as_slow_as_a_new_one_and_ones_own_is_not(tmp_path: Path):
    with running(**{"gateway.keys": _keys_file(tmp_path), "kv.num_blocks": 512}) as cluster:
        shared, new, own = _times(cluster)
    assert auc(shared, new) <= MAX_AUC
    assert auc(own, new) > 0.9  # the cache is on, and this would show it


@pytest.mark.parametrize("tier", ["host", "store", "ssd"])
def test_nor_where_what_was_asked_before_lies_in_a_tier_below_the_pages(tier: str, tmp_path: Path):
    store = {"kv.store.enabled": "true", "kv.store.host_bytes": 0} | {
        "host": {"kv.store.host_bytes": TIER_BYTES},
        "store": {"kv.store.dram_bytes": TIER_BYTES},
        "ssd": {"kv.store.ssd_path": tmp_path / "kv", "kv.store.ssd_bytes": TIER_BYTES},
    }[tier]
    with running(**{"gateway.keys": _keys_file(tmp_path), "kv.num_blocks": NUM_FEW_BLOCKS, **store}) as cluster:
        shared, new, own = _times(cluster)
        assert cluster.metric("moonshard_cached_tokens_total", tier=tier) > 5 * NUM_PROMPT  # one's own are found there
    assert auc(shared, new) <= MAX_AUC
    assert auc(own, new) > 0.9


def _keys_file(folder: Path) -> Path:
    path = folder / "keys.toml"
    path.write_text("[keys]\n" + "".join(f'{hash_key(key)} = "{name}"\n' for name, key in KEYS.items()))
    return path


def _times(cluster: Cluster) -> tuple[list[float], list[float], list[float]]:
    """Seconds to the first token of prompts asked before: by another tenant, by nobody, by oneself."""
    random, one, other = Random(0), KEYS["one"], KEYS["other"]
    shared: list[float] = []
    new: list[float] = []
    own: list[float] = []
    with cluster.client() as client:
        for pair in range(NUM_PAIRS):
            known, unknown = ([random.randrange(VOCAB_SIZE) for _ in range(NUM_PROMPT)] for _ in range(2))
            ttft_s(client, known, one)
            asked = [(shared, known), (new, unknown)]
            for found, prompt in asked if pair % 2 else reversed(asked):  # whichever comes first
                found.append(ttft_s(client, prompt, other))
            if pair % 10 == 0:
                own.append(ttft_s(client, known, one))
    return shared, new, own
