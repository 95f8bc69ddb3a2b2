"""Prompts asked of a deployment that keeps KV beyond its device's pages, and whether they were found again."""

from pathlib import Path

from moonshard.rpc.types import Completion
from moonshard.serving.control.sampling_parameters import Sampling
from tests.agreement import assert_drawn_from, reference
from tests.cluster.conftest import Cluster
from tests.engine_room import long_text
from tests.sizes import BLOCK_SIZE

PROMPTS = [long_text(length, seed=length) for length in (65, 150, 300, 500)]
NUM_BLOCKS = sum(len(prompt) // BLOCK_SIZE for prompt in PROMPTS)


def with_store(folder: Path, **keys: object) -> dict[str, object]:
    """Overrides: the tiers that `keys` name, and a cluster key that stays."""
    store = {"kv.store.enabled": "true", "kv.store.host_bytes": 0}
    return {"cluster.key_file": folder / "cluster.key", **store, **keys}


def ask(cluster: Cluster, prompt: list[int]) -> Completion:
    with cluster.client() as client:
        return client.generate(prompt, temperature=0, max_tokens=20, ignore_eos=True)


def answers(cluster: Cluster, prompts: list[list[int]] = PROMPTS) -> list[tuple[int, ...]]:
    """Those of the reference."""
    found = [ask(cluster, prompt) for prompt in prompts]
    for prompt, one in zip(prompts, found, strict=True):
        assert_drawn_from(reference(), prompt, list(one.choices[0].token_ids), Sampling(temperature=0.0))
    return [one.choices[0].token_ids for one in found]


def assert_found_again(cluster: Cluster, before: list[tuple[int, ...]], tier: str) -> None:
    """Not each of them: where computing so small a model seems faster than fetching, it is computed."""
    found = [ask(cluster, prompt) for prompt in PROMPTS]
    assert [one.choices[0].token_ids for one in found] == before
    for prompt, one in zip(PROMPTS, found, strict=True):
        assert one.usage.cached_tokens in (0, len(prompt) // BLOCK_SIZE * BLOCK_SIZE)
        assert sum(one.usage.cached_by_tier.values()) == one.usage.cached_tokens
        assert one.usage.cached_by_tier.keys() <= {tier}
    assert any(one.usage.cached_tokens for one in found)


def num_kept(cluster: Cluster, tier: str) -> float:
    return cluster.metric("moonshard_tier_kept_blocks_total", tier=tier)
