"""The least that rows ask of a machine, against numbers worked out by hand from the checkpoint's configuration."""

from pathlib import Path

import pytest

from moonshard.experiments.bench.floors.asked import decode_work, held_bytes, prompt_work, row_work
from moonshard.experiments.bench.floors.work import (
    ItemBytes,
    attention_work,
    expanded_attention_work,
    expected_experts,
    step_work,
)
from moonshard.experiments.bench.peers.proportions import CONFIG
from moonshard.experiments.bench.peers.rows import Cached, ClosedLoop, Decoding, Prefilling, seconds_of
from moonshard.models.kimi.config import KimiConfig
from moonshard.models.kimi.family import Kimi
from moonshard.models.registry import open_model
from moonshard.serving.config.reading import load_config

FIXTURE = Path(__file__).parents[3] / "fixtures" / "kimi_k2"
MODEL = Kimi(KimiConfig.from_hugging_face(CONFIG))
SIZE = ItemBytes(weights=2, kv=4)
# hidden 512, 8 heads, ranks 256 and 512, rope = nope = v = 64; each product, then the norms
ATTENTION = 256 * 512 + 8 * 128 * 256 + 576 * 512 + 2 * (8 * 64 * 512) + 512 * 512 + (512 + 256 + 512)
EXPERT = 3 * 512 * 256  # the shared one has the same size
DENSE = 3 * 512 * 1536
ROUTER = 32 * 512 + 32
HEAD = 8192 * 512
OUTSIDE_EXPERTS = 8 * (ATTENTION + 512) + DENSE + 7 * (EXPERT + ROUTER) + HEAD


def test_one_token_reads_four_experts_of_each_layer_and_everything_else_once():
    work = decode_work(MODEL, 1, 99, SIZE)
    values = OUTSIDE_EXPERTS + 7 * 4 * EXPERT
    assert work.num_bytes == pytest.approx(2 * values + 4 * 8 * 100 * 576)
    # 100 keys of 8 heads in 8 layers, absorbed: scores over 576 values and sums over 512
    assert work.num_flops == pytest.approx(2 * values + 8 * 8 * 100 * 2 * (576 + 512))


def test_a_batch_hits_as_many_experts_as_an_even_router_would():
    assert expected_experts(MODEL, 1) == pytest.approx(4)
    assert expected_experts(MODEL, 2) == pytest.approx(4 + 4 * 28 / 32)  # the second token's, where the first has none
    assert 31 < expected_experts(MODEL, 32) < 32
    assert expected_experts(MODEL, 512) == pytest.approx(32)


def test_a_batch_reads_weights_once_and_keys_once_for_each_sequence():
    one, eight = (decode_work(MODEL, batch, 63, SIZE) for batch in (1, 8))
    more_experts = 7 * EXPERT * (expected_experts(MODEL, 8) - 4)
    assert eight.num_bytes - one.num_bytes == pytest.approx(2 * more_experts + 4 * 7 * 8 * 64 * 576)
    assert eight.num_flops == pytest.approx(8 * one.num_flops)


def test_a_prompt_needs_one_row_of_logits_and_expanded_keys():
    work = prompt_work(MODEL, 512, SIZE)
    by_token = OUTSIDE_EXPERTS - HEAD + 7 * 4 * EXPERT
    pairs = 512 * 513 // 2
    expanded = 8 * 8 * pairs * 2 * (128 + 64)
    assert work.num_flops == pytest.approx(2 * (512 * by_token + HEAD) + expanded)
    assert work.num_bytes == pytest.approx(2 * (OUTSIDE_EXPERTS + 7 * 32 * EXPERT) + 4 * 8 * 512 * 576)


def test_a_chunk_after_a_long_context_pays_for_expanding_what_came_before():
    spans = [(2048, 2048 + 8)]
    absorbed, expanded = (form(MODEL, spans, 4) for form in (attention_work, expanded_attention_work))
    expansion = 2 * 2048 * 512 * 8 * (64 + 64)
    pairs = sum(position + 1 for position in range(2048, 2056))
    assert expanded.num_flops == expansion + 8 * pairs * 2 * (128 + 64)
    assert expanded.num_flops > absorbed.num_flops
    assert step_work(MODEL, spans, [], SIZE).attention.num_flops == 8 * absorbed.num_flops


def test_parts_of_a_step_are_the_whole():
    work = step_work(MODEL, [(0, 100), (7, 8)], [5.0] * 7, SIZE)
    parts = (work.routed, work.attention, work.projections, work.mlp, work.router, work.head)
    assert sum(part.num_bytes for part in parts) == pytest.approx(work.whole.num_bytes)
    assert sum(part.num_flops for part in parts) == pytest.approx(work.whole.num_flops)


def test_a_worker_holds_every_weight_and_its_pool():
    config = load_config(None, [f"model.path={FIXTURE}", "kv.num_blocks=64", "kv.block_size=16"])
    checkpoint, model = open_model(FIXTURE)
    weights_bytes, pool_bytes = held_bytes(config, model, SIZE)
    assert weights_bytes == 2 * sum(checkpoint.tensor(name).size for name in checkpoint.names)
    raw = checkpoint.config
    token_values = raw["num_hidden_layers"] * (raw["kv_lora_rank"] + raw["qk_rope_head_dim"])
    assert pool_bytes == 64 * 16 * token_values * 4


def test_a_closed_loop_is_its_prompts_and_the_steps_of_all_its_clients():
    loop = ClosedLoop(num_requests=32, num_clients=8, prompt_tokens=512, completion_tokens=33)
    work = row_work(MODEL, loop, SIZE)
    prompts, step = prompt_work(MODEL, 512, SIZE), decode_work(MODEL, 8, 528, SIZE)
    assert work.num_bytes == pytest.approx(32 * prompts.num_bytes + 128 * step.num_bytes)
    assert work.num_flops == pytest.approx(32 * prompts.num_flops + 128 * step.num_flops)


def test_what_is_cached_leaves_one_token_to_compute():
    assert row_work(MODEL, Cached(prompt_tokens=512, repeats=3), SIZE) == decode_work(MODEL, 1, 511, SIZE)


def test_a_figure_becomes_the_time_of_what_is_counted():
    rows = (
        (Decoding(batch=8, prompt_tokens=1, completion_tokens=2), 20.0, 0.020),
        (Cached(prompt_tokens=512, repeats=1), 20.0, 0.020),
        (Prefilling(prompt_tokens=512), 1024.0, 0.5),
        (ClosedLoop(num_requests=32, num_clients=8, prompt_tokens=512, completion_tokens=32), 512.0, 2.0),
    )
    for row, figure, seconds in rows:
        assert seconds_of(row, figure) == pytest.approx(seconds)
