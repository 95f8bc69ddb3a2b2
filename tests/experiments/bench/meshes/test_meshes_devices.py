"""Miniatures of what is measured of meshes on devices: every figure of the tables is there."""

from collections import Counter

import numpy as np
import pytest

from moonshard.experiments.bench.meshes.bubble import measure_bubbles
from moonshard.experiments.bench.meshes.reshard import blocks_of, layout_of, measure_reshard
from moonshard.experiments.bench.meshes.tables import LAYOUT_PAIRS, LAYOUTS, NUM_BLOCKS, bubble_grid, reshard_grid
from moonshard.experiments.common.running.measurement import Plan
from moonshard.serving.config.reading import load_config
from tests.agreement import FIXTURES

pytestmark = pytest.mark.xdist_group("jax")


class TestReshard:
    def test_every_pair_has_its_row(self):
        plan = Plan(reshard_repeats=1)
        rows = {row[0]: row for row in reshard_grid(measure_reshard(plan), plan).rows}
        assert len(rows) == len(LAYOUT_PAIRS)
        assert rows["tensor 8 to tensor 8"][4:6] == (f"{8 * NUM_BLOCKS}", "8")  # whole shards: one run for each owner
        assert rows["pipe 8 to tensor 8 by tokens"][4:6] == (f"{61 * 8 * NUM_BLOCKS:,}",) * 2

    @pytest.mark.parametrize("name", LAYOUTS)
    def test_the_bytes_of_a_block_are_cut_as_evenly_as_layers_and_tokens_allow(self, name: str):
        (group,) = layout_of(name).groups
        layers = Counter(shard.tile.layers.stop - shard.tile.layers.start for shard in group.shards)
        assert sorted(shard.owner for shard in group.shards) == list(range(8))
        assert set(layers) <= ({31, 30, 61} if "by tokens" in name else {5, 6, 7, 8})

    def test_scattered_blocks_adjoin_nowhere_and_land_apart(self):
        source, destination = blocks_of("scattered")
        assert len(set(source.tolist())) == len(set(destination.tolist())) == NUM_BLOCKS
        order = np.argsort(destination)
        assert not ((np.diff(source[order]) == 1) & (np.diff(destination[order]) == 1)).any()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_pipeline_has_a_row_for_one_microbatch_and_one_for_as_many_as_stages():
    settings = ("model.max_context_tokens=128", "kv.num_blocks=64", "kv.block_size=16")
    config = load_config(None, [f"model.path={FIXTURES / 'kimi_k2'}", *settings])
    plan = Plan(pipeline_rows=4, pipeline_context=16, pipeline_steps=8, pipeline_repeats=1)
    rows = bubble_grid(measure_bubbles(config, plan, pipes=(2,)), plan).rows
    assert [row[:3] for row in rows] == [("2", "1", "4"), ("2", "2", "2")]
    assert all(float(row[5]) < 1 for row in rows)
