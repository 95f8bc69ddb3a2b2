"""The sizes of steps follow from the configuration, and where it says nothing from the kind of machine."""

import logging
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.models.machines import MACHINES
from moonshard.models.registry import open_model
from moonshard.serving.config.keys import Config, KvConfig, ModelConfig, PrefillConfig
from moonshard.serving.engine.capacity.sizes import buckets, choose_sizes, prefill_buckets
from moonshard.serving.engine.loading.model import load_model, machine_for
from tests.agreement import FIXTURES

pytestmark = pytest.mark.xdist_group("jax")
FOLDER = FIXTURES / "kimi_k2"


def config(asked: int | None, block_size: int) -> Config:
    return Config(
        model=ModelConfig(path=FOLDER, name="tiny"),
        kv=KvConfig(block_size=block_size, num_blocks=64),
        prefill=PrefillConfig(chunk_tokens=asked),
    )


@given(st.integers(1, 5000), st.sampled_from([1, 3, 16, 32]))
def test_buckets_ascend_by_at_most_doubling_to_the_largest(largest, smallest):
    found = buckets(largest, smallest)
    assert found[0] == smallest
    assert found[-1] - smallest < largest <= found[-1]
    assert all(bucket % smallest == 0 for bucket in found)
    assert all(a < b <= 2 * a for a, b in pairwise(found))


@pytest.mark.parametrize("kind", MACHINES)
@given(chunk_tokens=st.integers(1, 5000))
def test_prefill_steps_are_whole_rows_or_a_part_of_one(kind: str, chunk_tokens: int):
    machine = MACHINES[kind]
    found = prefill_buckets(chunk_tokens, machine)
    assert found[0] == 1
    found = found[found.index(machine.few_tokens) :]
    assert found[-1] - machine.tile_tokens < chunk_tokens <= found[-1]
    assert all(size % machine.tile_tokens == 0 or size < machine.tile_tokens for size in found)
    assert all(a < b <= 2 * a for a, b in pairwise(found))


@pytest.mark.parametrize("kind", MACHINES)
def test_without_a_configured_chunk_the_machine_s_is_taken_in_whole_blocks(kind: str):
    _, model = open_model(FOLDER)
    machine = replace(MACHINES[kind], chunk_tokens=160)
    for asked, expected in ((None, 192), (96, 96)):
        shapes, _ = choose_sizes(config(asked, 48), model, "float32", machine=machine)
        assert (shapes.prefill_buckets[:2], shapes.q_tile) == ((1, machine.few_tokens), machine.tile_tokens)
        assert shapes.prefill_buckets[-1] == expected


@pytest.mark.parametrize("asked", [None, 64])
def test_a_chunk_that_the_machine_decides_is_told(asked: int | None, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "moonshard.serving.engine.loading"):
        loaded = load_model(config(asked, 64), "both", lambda message: None, prepares="none")
    told = [each.getMessage() for each in caplog.records if each.getMessage().startswith("prefill.chunk_tokens")]
    largest = loaded.shapes.prefill_buckets[-1]
    assert told == ([] if asked else [f"prefill.chunk_tokens: {largest}, as the table has it for {loaded.kernels}"])
    assert largest == (asked or machine_for("cpu").chunk_tokens)
