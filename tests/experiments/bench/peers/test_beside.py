"""The whole table in miniature: our two servers, one that answers by a script, one that is not there."""

import dataclasses
import os
import time
from pathlib import Path

import pytest

from moonshard.experiments.bench.peers import beside as measuring
from moonshard.experiments.bench.peers.beside import (
    AGGREGATED,
    APART,
    AT_START,
    EMPTY,
    FULL,
    IN_FLOAT32,
    MEMORY,
    OURS,
    WORKER_MEMORY,
    configs_of,
    measure_beside,
)
from moonshard.experiments.bench.peers.completions import Peer
from moonshard.experiments.bench.peers.table import beside_grids
from moonshard.experiments.common.running.measurement import QUICK
from moonshard.serving.config.reading import load_config
from tests.experiments.bench.peers.fake_openai import Script, answering

TINY = Path(__file__).parents[3] / "fixtures" / "kimi_k2"
SETTINGS = (
    f"model.path={TINY}",
    *("model.max_context_tokens=128", "kv.num_blocks=64", "kv.block_size=16"),
    *("prefill.chunk_tokens=32", "decode.max_slots=4"),
)
PLAN = dataclasses.replace(
    QUICK,
    batches=(1, 2),
    context_tokens=(8,),
    compared_prompts=(20, 40),
    compared_tokens=4,
    compared_tries=1,
    loop_requests=4,
    loop_clients=2,
    loop_tokens=3,
)
NUM_ROWS = 2 + 2 + 1 + 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("cluster")
def test_every_cell_of_ours_is_filled_and_of_a_peer_what_it_can_give(monkeypatch):
    monkeypatch.setattr(measuring, "run_peer", lambda folder, plan: None)
    with answering(Script()) as url:
        peers = (Peer(name="fake", url=url), Peer(name="gone", url="http://127.0.0.1:9"))
        begun_s = time.perf_counter()
        found = measure_beside(load_config(None, SETTINGS), peers, PLAN, os.environ, lambda text: None)
        elapsed_s = time.perf_counter() - begun_s
    rows = {row.name for row in found.rows}
    assert len(rows) == NUM_ROWS
    cells = {
        server: {name for name, other in found.comparison.figures if other == server} for server in (*OURS, "fake")
    }
    at_start = {AT_START.format(caches) for caches in ("empty", "full")}
    assert cells[AGGREGATED] == rows | {EMPTY, FULL, MEMORY, WORKER_MEMORY, *at_start}
    assert cells[IN_FLOAT32] == cells[APART] == rows | {MEMORY, WORKER_MEMORY}
    assert cells["fake"] == rows | {MEMORY}
    assert {name: set(least.work) for name, least in found.least.items()} == {AGGREGATED: rows, IN_FLOAT32: rows}
    empty, full = (found.comparison.figures[name, AGGREGATED] for name in (EMPTY, FULL))
    assert 0 < sum(empty.values) + sum(full.values) < elapsed_s  # there are both in it, and more
    assert found.ceilings.bytes_per_s > 1e8
    assert found.ceilings.matmul_flops_per_s > 1e8
    notes = beside_grids(found)[0].notes
    assert any(note.startswith("gone: nothing was measured") for note in notes)
    assert any(note.startswith("Hugging Face: not installed") for note in notes)


def test_where_the_configuration_says_how_weights_lie_ours_has_no_other_form():
    assert list(configs_of(load_config(None, SETTINGS))) == list(OURS)
    held = configs_of(load_config(None, (*SETTINGS, "model.weights=float32")))
    assert {name: (own.mode, own.model.weights) for name, own in held.items()} == {
        AGGREGATED: ("aggregated", "float32"),
        APART: ("disaggregated", "float32"),
    }
