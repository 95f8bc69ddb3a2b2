"""The GPU bench needs little, refuses without a card, times nothing that is wrong, and its floors add up."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moonshard.experiments.bench.floors.work import (
    Ceilings,
    Work,
    attention_work,
    num_values,
    routed_work,
    step_work,
)
from moonshard.experiments.bench.gpu import command as gpu
from moonshard.experiments.bench.gpu.checks import Check, MoeCase, check_sums
from moonshard.experiments.bench.gpu.rows import Bench
from moonshard.experiments.bench.gpu.serving.steps import WORST_MEDIAN_ERROR
from moonshard.experiments.bench.gpu.slice import decode_batch, draw_weights, kimi_k2_slice, prefill_batch
from moonshard.experiments.bench.gpu.sweep import CUTS, variants
from moonshard.experiments.bench.gpu.timing import Effort, measure
from moonshard.experiments.reading.step_model import StepModel
from moonshard.models.experts import moe
from moonshard.models.gpu.experts.backend import rows_for

pytestmark = pytest.mark.xdist_group("jax")
ROOT = Path(__file__).parents[4]
K2 = kimi_k2_slice(60)
TRIAL = gpu.trial_scale(2)
ABSENT_ON_A_BARE_MACHINE = (
    *("grpc", "google.protobuf", "msgspec", "fastapi", "uvicorn", "uvloop", "httptools", "httpx", "tokenizers"),
    *("tiktoken", "jinja2", "tyro", "prometheus_client", "jaxtyping", "beartype", "tests"),
    *("polars", "xxhash", "limits", "opentelemetry", "mooncake"),
)
RUN_BARE = f"""
import runpy, sys
for name in {ABSENT_ON_A_BARE_MACHINE!r}:
    sys.modules[name] = None
runpy.run_module("moonshard.experiments.bench.gpu.command", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_command_runs_where_only_jax_is_installed(tmp_path):
    out = tmp_path / "deep" / "result.json"
    arguments = ["--allow-cpu", "--quick", "--moe-layers", "1", "--out", str(out), "--seed", "7"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, "-c", RUN_BARE, *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(out.read_text())
    assert report["environment"]["jax"] == jax.__version__
    assert all(check["passed"] for check in report["checks"])
    checks = {check["name"] for check in report["checks"]}
    assert {"kimi_k2 logits, grouped", "kimi_k2 logits, blocks", "bytes that a handoff changes"} <= checks
    names = [row["name"] for row in report["rows"]]
    wanted_rows = (
        "MoE layer, 1 tokens, grouped",
        "MoE layer, 1 tokens, blocks",
        "MoE layer in int4, 1 tokens, grouped",
        "MoE layer in fp8, 32 tokens, grouped",
        "prefill, 2 layers, absorbed",
        "prefill, 2 layers, expanded",
    )
    for wanted in (*wanted_rows, "export, 1 blocks, to the host", "land, 1 blocks, from the host"):
        assert wanted in names
    assert any(name.startswith("decode, 2 layers, batch 2, context") for name in names)
    assert all(row["median_ms"] > 0 and row["floor_ms"] > 0 for row in report["rows"])
    assert sum(names[-1] in line for line in done.stdout.splitlines()) == 2  # as it was measured, and in the table
    check_served(report, done.stdout)


def check_served(report, said):
    """What the part with engines leaves, and that it comes last, before the file's name."""
    arms = report["apart"]["arms"]
    assert [arm["arm"] for arm in arms] == ["both, chunks of 16", "both, chunks of 32", "apart"]
    for arm in arms:
        assert arm["num_requests"] == 8
        assert arm["num_tokens"] == 2 * 3 + 6 * 8
        assert all(arm[what][quantile] > 0 for what in ("ttft_ms", "itl_ms") for quantile in ("p50", "p90", "p99"))
        assert arm["first_gap_ms"]["p50"] > 0
    assert report["apart"]["capacity_per_s"] > 0
    assert {best["arm"] for best in report["apart"]["best"]} <= {"both, chunks of 16", "both, chunks of 32"}
    names = {check["name"] for check in report["checks"]}
    assert {"kimi_k2, one engine: wrong answers", "kimi_k2, two engines: wrong answers"} <= names
    assert any(name.startswith("the slice alone") for name in names)
    for kind in ("prefill", "decode"):
        fitted = report["step_times"][kind]
        assert min(fitted[name] for name in ("fixed_ms", "row_us", "pair_ns", "median_error", "p90_error")) >= 0
        assert fitted["num_steps"] <= report["steps"]["kind"].count(kind)
    assert StepModel.from_json(json.dumps(report["step_times"])).source == report["step_times"]["source"]
    assert {len(column) for column in report["steps"].values()} == {len(report["steps"]["kind"])}
    last, error = said.splitlines()[-2], report["step_times"]["decode"]["median_error"]
    assert last.startswith("decode: ")
    assert f"median error {error:.1%}" in last
    assert ("each step" in last) == (error <= WORST_MEDIAN_ERROR)  # steps this small may follow no size


def test_without_a_gpu_it_refuses_in_one_line(capsys):
    assert gpu.main([]) == 2
    assert capsys.readouterr().out.count("\n") == 1


def test_a_failed_check_ends_it_before_anything_is_timed(tmp_path, monkeypatch):
    wrong = Check(name="wrong", error=float("nan"), tolerance=1.0)
    monkeypatch.setattr(gpu, "_checks", lambda *_: iter([wrong]))
    out = tmp_path / "result.json"
    assert gpu.main(["--allow-cpu", "--out", str(out)]) == 1
    report = json.loads(out.read_text())
    assert "rows" not in report
    assert [check["passed"] for check in report["checks"]] == [False]


def test_engines_that_answer_wrong_are_not_timed(monkeypatch):
    def never(*_):
        raise AssertionError("compiled or timed")

    wrong = Check(name="wrong", error=1.0, tolerance=0)
    monkeypatch.setattr(gpu, "recorded_pair", lambda *_: None)
    monkeypatch.setattr(gpu, "check_recorded", lambda *_: iter([wrong]))
    monkeypatch.setattr(gpu, "build_pair", never)
    bench = Bench(
        sizes=TRIAL.sizes,
        loaded=None,
        ceilings=Ceilings(bytes_per_s=1.0, matmul_flops_per_s=1.0),
        effort=TRIAL.effort,
        seed=1,
    )
    journal = gpu.Journal({})
    options = argparse.Namespace(fixtures=gpu.FIXTURES, seed=1)
    assert not gpu._serve(options, TRIAL.serving, bench, moe.blocks, journal)
    assert [check["passed"] for check in journal.report["checks"]] == [False]
    monkeypatch.setattr(gpu, "check_recorded", lambda *_: iter([]))
    monkeypatch.setattr(gpu, "build_pair", lambda *_: None)
    monkeypatch.setattr(gpu, "check_alone", lambda *_: wrong)
    monkeypatch.setattr(gpu, "serve_arms", never)
    assert not gpu._serve(options, TRIAL.serving, bench, moe.blocks, journal)
    assert "apart" not in journal.report


@pytest.mark.parametrize(
    ("arguments", "ran"),
    [([], ["rows", "serving"]), (["--only", "rows"], ["rows"]), (["--only", "serving"], ["serving"])],
)
def test_either_part_runs_alone(tmp_path, monkeypatch, arguments, ran):
    parts = []
    monkeypatch.setattr(gpu, "_prepare", lambda *_: "a bench")
    monkeypatch.setattr(gpu, "_measure_rows", lambda *_: parts.append("rows"))
    monkeypatch.setattr(gpu, "_serve", lambda *_: parts.append("serving") is None)
    assert gpu.main(["--allow-cpu", "--out", str(tmp_path / "result.json"), *arguments]) == 0
    assert parts == ran


def test_what_was_measured_before_an_error_is_written(tmp_path, monkeypatch):
    def run(options, scale, backends, journal):
        journal.report["rows"] = ["one"]
        raise MemoryError

    monkeypatch.setattr(gpu, "_run", run)
    out = tmp_path / "result.json"
    with pytest.raises(MemoryError):
        gpu.main(["--allow-cpu", "--out", str(out)])
    assert json.loads(out.read_text())["rows"] == ["one"]


@pytest.mark.slow
def test_a_backend_that_uses_another_layer_does_not_pass():
    def wrong(x, routing, valid, experts, layer):
        return moe.blocks(x, routing, valid, experts, layer - 1)

    case = MoeCase(num_tokens=9, top_k=2, num_experts=4, embed=32, ffw=16)
    assert all(check.passed for check in check_sums(moe.blocks, (case,), seed=1))
    assert not any(check.passed for check in check_sums(wrong, (case,), seed=1))


def test_kimi_k2_has_a_trillion_parameters_and_88_megabytes_per_expert():
    assert num_values(K2.declare()) == pytest.approx(1.026e12, rel=1e-3)
    assert routed_work(K2, 1, 1, 2).num_bytes == 3 * 7168 * 2048 * 2
    assert routed_work(K2, 5, 3, 2).num_flops == 2 * 5 * 8 * 3 * 7168 * 2048


@pytest.mark.parametrize("spans", [[(0, 7)], [(5, 6), (9, 10)], [(3, 8), (0, 2)]])
def test_attention_counts_every_visible_key_of_every_query(spans):
    pairs = sum(position + 1 for start, stop in spans for position in range(start, stop))
    work = attention_work(K2, spans, 2)
    assert work.num_flops == pairs * 64 * 2 * (576 + 512)
    assert work.num_bytes == sum(stop for _, stop in spans) * 576 * 2


def test_a_decode_steps_floor_is_its_parts_one_after_another():
    model = kimi_k2_slice(2)
    work = step_work(model, [(1024, 1025)] * 16, [109, 111], 2)
    ceilings = Ceilings(bytes_per_s=4e12, matmul_flops_per_s=8e14)
    experts = 220 * 3 * 7168 * 2048 * 2
    outside = (num_values(model.declare()) - 2 * 384 * 3 * 7168 * 2048 - 163840 * 7168 - 7168) * 2
    assert work.routed.num_bytes == experts
    assert work.rest.num_bytes == outside
    assert work.floor_s(ceilings) == pytest.approx(work.whole.num_bytes / 4e12, rel=1e-12)  # all of it waits for memory
    assert work.floor_s(ceilings) > work.routed.floor_s(ceilings) > experts / 4.001e12


@pytest.mark.parametrize(("num_bytes", "num_flops", "floor_s"), [(10, 1, 5.0), (1, 12, 3.0)])
def test_a_floor_is_the_slower_of_moving_and_computing(num_bytes, num_flops, floor_s):
    ceilings = Ceilings(bytes_per_s=2, matmul_flops_per_s=4)
    assert Work(num_bytes=num_bytes, num_flops=num_flops).floor_s(ceilings) == floor_s


def test_timing_leaves_the_first_calls_out_and_repeats_as_asked():
    made = []

    def call():
        made.append(jnp.zeros(1))
        return made[-1]

    timing = measure(call, Effort(num_samples=5, calls_per_sample=3))
    assert len(timing.samples_s) == 5
    assert len(made) == 2 + 5 * 3


def test_sequences_of_a_batch_share_no_block_and_reach_their_context():
    sizes = TRIAL.sizes
    batch = decode_batch(sizes, max(sizes.batches), max(sizes.context_tokens), seed=3)
    blocks = np.asarray(batch.block_tables).ravel()
    assert len(set(blocks.tolist())) == len(blocks)
    assert blocks.max() < sizes.num_blocks
    assert max(sizes.context_tokens) < batch.block_tables.shape[2] * sizes.block_size


def test_a_prompts_rows_hold_every_position_once():
    batch = prefill_batch(TRIAL.sizes, seed=3)
    assert np.asarray(batch.positions).ravel().tolist() == list(range(TRIAL.sizes.prompt_tokens))
    assert batch.tokens.shape[1] == TRIAL.sizes.q_tile


@pytest.mark.slow
def test_every_expert_is_drawn_anew_and_none_is_left_at_zero():
    config = TRIAL.sizes.model
    drawn = draw_weights(config, seed=5).experts
    assert drawn is not None
    for leaf in (drawn.gate_up, drawn.down):
        values = np.asarray(leaf, np.float32)
        matrices = values.reshape(values.shape[0] * values.shape[1], -1)
        assert len(np.unique(matrices, axis=0)) == len(matrices)
        np.testing.assert_allclose(matrices.std(axis=1), values.shape[-1] ** -0.5, rtol=0.15)


def test_a_sweep_tries_every_cut_and_other_blocks_that_the_tensor_cores_take():
    for pairs in (8, 1024, 16384, 65536):
        rows = rows_for(pairs, 384)
        tried = list(variants(rows))
        assert {cut for num_rows, cut in tried if num_rows == rows} == set(CUTS)
        assert {num_rows for num_rows, _ in tried} - {rows} == {rows // 2, 2 * rows} & {16, 32, 64, 128}
