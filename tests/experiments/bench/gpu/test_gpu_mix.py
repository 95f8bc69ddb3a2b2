"""What is made of requests and steps in the GPU bench: its load, its figures, the best of an arm, and the fit."""

import json
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.experiments.bench.gpu.serving.apart import APART
from moonshard.experiments.bench.gpu.serving.clients import Heard
from moonshard.experiments.bench.gpu.serving.mix import (
    ArmRun,
    Mix,
    best_of,
    draw_arrivals,
    draw_requests,
    num_alike,
)
from moonshard.experiments.bench.gpu.serving.rows import ServedRow, as_json, full_plan, print_served, quicker, tiny_plan
from moonshard.experiments.bench.gpu.serving.steps import StepRows, as_model, fit_columns, spell_fit
from moonshard.experiments.common.step_regression import TooFewSteps
from moonshard.experiments.reading.step_model import StepModel, StepTimes
from moonshard.serving.control.plan import DecodePlan, DecodeRow, LoadPlan
from moonshard.serving.control.request import Request, SequenceId, SlotId
from moonshard.serving.engine.device import StepDone
from moonshard.serving.engine.steps import StepKind

MS = 1_000_000  # nanoseconds
MIX = Mix(prompt_tokens=(2048, 64), output_tokens=(16, 128), num_requests=(16, 48))
REQUEST = Request(id=bytes(16), prompt=(1, 2), max_tokens=3)
PLANS = [make(plan) for plan in (full_plan(), tiny_plan()) for make in (lambda plan: plan, quicker)]


def heard(*arrivals_ms: float, tokens: tuple[int, ...] = (7, 8, 9)) -> Heard:
    return Heard(REQUEST, 100 * MS, list(tokens), [100 * MS + int(ms * MS) for ms in arrivals_ms])


def arm_run(arm: str, *repeats: tuple[Heard, ...], rate_per_s: float = 2.0) -> ArmRun:
    return ArmRun(arm=arm, rate_per_s=rate_per_s, repeats=repeats, num_alike=0)


class TestLoad:
    def test_every_kind_comes_as_often_as_said_and_fits_the_pool_to_its_last_token(self):
        requests = draw_requests(MIX, 163_840, Random(1))
        sizes = [(len(request.prompt), request.max_tokens) for request in requests]
        assert sorted(set(sizes)) == [(64, 128), (2048, 16)]
        assert (sizes.count((2048, 16)), sizes.count((64, 128))) == (16, 48)
        assert sizes != sorted(sizes)
        assert sizes != sorted(sizes, reverse=True)
        assert MIX.num_blocks(64) == 16 * 33 + 48 * 3
        assert MIX.max_context_tokens == 2064

    def test_arrivals_are_a_poisson_process_and_the_same_for_the_same_seed(self):
        requests = [REQUEST] * 4000
        found = [draw_arrivals(requests, 8.0, Random(3)) for _ in range(2)]
        assert found[0] == found[1]
        at_s = [at for at, _ in found[0]]
        assert at_s[0] == 0
        gaps_s = [after - before for before, after in pairwise(at_s)]
        assert min(gaps_s) >= 0
        assert np.mean(gaps_s) == pytest.approx(1 / 8, rel=0.1)
        assert np.std(gaps_s) == pytest.approx(1 / 8, rel=0.1)  # as an exponential has it

    @pytest.mark.parametrize("plan", PLANS)
    def test_whatever_is_asked_has_a_program(self, plan):
        sizes = plan.sizes
        assert set(sizes.chunk_tokens) <= set(sizes.prefill_buckets)
        assert sizes.chunk_tokens[-1] == sizes.prefill_buckets[-1]
        assert all(bucket % sizes.q_tile == 0 for bucket in sizes.prefill_buckets)
        assert sizes.num_blocks >= plan.mix.num_blocks(sizes.block_size)
        assert sizes.max_context_tokens >= plan.mix.max_context_tokens
        for ascending in (sizes.prefill_buckets, sizes.chunk_tokens, sizes.decode_buckets):
            assert list(ascending) == sorted(set(ascending))
        assert plan.num_repeats >= 1


class TestFigures:
    def test_times_count_from_when_a_request_was_due_and_the_first_gap_is_the_handoff(self):
        run = arm_run(APART, (heard(10, 40, 45),), (heard(20, 22, 27),))
        assert (run.ttft_ms(0), run.ttft_ms(1)) == (10, 20)
        assert (run.first_gap_ms(0), run.first_gap_ms(1)) == (2, 30)
        assert (run.itl_ms(0), run.itl_ms(0.5), run.itl_ms(1)) == (2, 5, 30)
        assert run.itl_p90_of_repeats_ms == [pytest.approx(27.5), pytest.approx(4.7)]

    def test_the_best_has_short_gaps_and_lets_nobody_wait_for_them(self):
        small = arm_run("both, chunks of 1", (heard(90, 91, 92),))
        middle = arm_run("both, chunks of 2", (heard(30, 32, 34),))
        large = arm_run("both, chunks of 3", (heard(20, 29, 38),))
        apart = arm_run(APART, (heard(1, 1.5, 2),))
        assert best_of([small, middle, large, apart]) is middle
        assert best_of([small, apart]) is small

    def test_alike_are_requests_with_the_same_tokens_in_the_same_place(self):
        some = [heard(1, 2, 3), heard(1, 2, 3, tokens=(7, 8, 1)), heard(1, 2, 3, tokens=(4, 5, 6))]
        others = [heard(2, 3, 4), heard(1, 2, 3), heard(1, 2, 3, tokens=(4, 5, 6))]
        assert num_alike(some, others) == 2

    def test_the_report_has_every_arm_at_every_rate_and_what_the_best_is_beside_apart(self, capsys):
        runs = [
            arm_run(arm, (heard(10, 10 + gap, 10 + 2 * gap),), rate_per_s=rate)
            for rate in (1.0, 2.0)
            for arm, gap in (("both, chunks of 1", 6.0 * rate), ("both, chunks of 2", 3.0 * rate), (APART, 1.5))
        ]
        served = ServedRow(capacity_per_s=4.0, runs=tuple(runs), steps=MadeUp())
        report = json.loads(json.dumps(as_json(served, "a card")))
        arms = report["apart"]["arms"]
        assert [(arm["rate_per_s"], arm["arm"]) for arm in arms] == [(run.rate_per_s, run.arm) for run in runs]
        assert arms[0]["itl_ms"] == {"p50": 6.0, "p90": 6.0, "p99": 6.0}
        assert (arms[0]["num_requests"], arms[0]["num_tokens"]) == (1, 3)
        assert [(best["arm"], best["itl_p90_ratio"]) for best in report["apart"]["best"]] == [
            ("both, chunks of 2", 2.0),
            ("both, chunks of 2", 4.0),
        ]
        print_served(served)
        said = capsys.readouterr().out
        assert said.count("ITL p50") == len(runs)
        assert said.count("best of one engine: both, chunks of 2") == 2
        assert "prefill: each step, ms 2.000" in said


PREFILL = StepTimes(fixed_ms=2.0, row_us=30.0, pair_ns=4.0)
DECODE = StepTimes(fixed_ms=0.5, row_us=200.0, pair_ns=800.0)


STEP_COLUMNS = ("arm", "kind", "bucket", "batch", "context_tokens", "device_ns")


def made_up(
    prefill: StepTimes, decode: StepTimes, seed: int = 0, decode_buckets: tuple[int, ...] = (4, 8, 16, 32)
) -> dict[str, list]:
    """Columns of 200 steps of each kind and some lands, which take what these times say."""
    random = Random(seed)
    columns: dict[str, list] = {name: [] for name in STEP_COLUMNS}
    for kind, times in (("prefill", prefill), ("decode", decode)):
        for _ in range(200):
            bucket = random.choice((64, 256, 512, 1024) if kind == "prefill" else decode_buckets)
            batch = random.randint(1, 4)
            context = batch * random.randint(64, 2048)
            ms = times.ms(bucket=bucket, batch=batch, context_tokens=context)
            for name, value in zip(columns, ("both", kind, bucket, batch, context, round(ms * MS)), strict=True):
                columns[name].append(value)
    for name, value in zip(columns, ("both", "land", 4, 0, 0, 9 * MS), strict=True):
        columns[name] += [value] * 5
    return columns


class MadeUp(StepRows):
    def columns(self) -> dict[str, list]:
        return made_up(PREFILL, DECODE)


class TestStepTimes:
    @given(st.sampled_from((0.0, 0.5, 4.0)), st.sampled_from((20.0, 400.0)), st.sampled_from((1.0, 80.0)))
    def test_the_fit_gives_coefficients_back(self, fixed_ms: float, row_us: float, pair_ns: float):
        times = StepTimes(fixed_ms=fixed_ms, row_us=row_us, pair_ns=pair_ns)
        fits = fit_columns(made_up(times, DECODE))
        assert fits["prefill"].coefficients == pytest.approx((fixed_ms, row_us, pair_ns), rel=1e-3, abs=1e-3)
        assert fits["decode"].coefficients == pytest.approx((0.5, 200.0, 800.0), rel=1e-3)
        assert max(fit.p90_error for fit in fits.values()) < 1e-3
        assert [len(fit.measured_ms) for fit in fits.values()] == [200, 200]

    def test_a_simulator_reads_what_the_report_has(self):
        model = as_model(fit_columns(made_up(PREFILL, DECODE)), "a card")
        read = StepModel.from_json(json.dumps(model))
        assert read.source == "a card"
        assert read.prefill.ms(bucket=512, batch=1, context_tokens=512) == pytest.approx(
            PREFILL.ms(bucket=512, batch=1, context_tokens=512), rel=1e-3
        )
        assert read.decode.ms(bucket=8, batch=2, context_tokens=999) == pytest.approx(
            DECODE.ms(bucket=8, batch=2, context_tokens=999), rel=1e-3
        )
        assert model["prefill"]["num_steps"] == 200

    def test_what_steps_do_not_tell_has_no_number(self):
        fit = fit_columns(made_up(PREFILL, DECODE, decode_buckets=(8,)))["decode"]
        assert fit.unidentified == ("each row, us",)
        assert "each row, us unidentified" in spell_fit(fit)

    def test_steps_of_two_engines_change_no_fit(self):
        columns = made_up(PREFILL, DECODE)
        for name, value in zip(columns, (APART, "prefill", 1024, 1, 2048, MS // 5), strict=True):
            columns[name] += [value] * 100
        fit = fit_columns(columns)["prefill"]
        assert fit.coefficients == pytest.approx((2.0, 30.0, 4.0), rel=1e-3)
        assert len(fit.measured_ms) == 200

    def test_a_fit_that_says_nothing_of_its_steps_is_told_without_numbers(self):
        columns = made_up(PREFILL, DECODE)
        random = Random(5)
        columns["device_ns"] = [round(random.choice((0.2, 20.0)) * MS) for _ in columns["kind"]]
        fit = fit_columns(columns)["prefill"]
        assert fit.median_error > 0.25
        said = spell_fit(fit)
        assert "each row" not in said
        assert "do not say how long these steps take; median error" in said

    def test_too_few_steps_of_a_kind_are_refused(self):
        columns = made_up(PREFILL, DECODE)
        columns["kind"] = ["prefill" if kind == "decode" else kind for kind in columns["kind"]]
        with pytest.raises(TooFewSteps, match="0 steps of kind decode"):
            fit_columns(columns)


class TestSteps:
    """Of two engines on one device."""

    def done(self, kind: StepKind, launched_ms: float, done_ms: float) -> StepDone:
        return StepDone(
            number=1,
            kind=kind,
            drawn=None,
            exported=None,
            bucket=4,
            partition=0,
            num_blocks=2,
            launched_ns=int(launched_ms * MS),
            enqueued_ns=int(launched_ms * MS),
            done_ns=int(done_ms * MS),
            was_overlapped=False,
        )

    def test_a_step_took_what_it_added_whichever_engine_launched_the_one_before(self):
        sequence, slot = SequenceId(REQUEST.id, 0), SlotId(0, 0)
        rows = tuple(
            DecodeRow(sequence=sequence, request=REQUEST, slot=slot, position=position, block_table=())
            for position in (10, 20)
        )
        load = LoadPlan(number=2, sequence=sequence, request=REQUEST, slot=slot, history=(1,))
        steps = StepRows()
        told = steps.of_run(APART)
        told(self.done(StepKind.EXPORT, 0, 30), None)
        told(self.done(StepKind.LOAD, 25, 33), load)  # told when it was launched: nobody waits for its end
        told(self.done(StepKind.DECODE, 5, 37), DecodePlan(number=1, rows=rows))
        told(self.done(StepKind.LAND, 40, 42), None)
        steps.of_run("both")(self.done(StepKind.DECODE, 41, 44), DecodePlan(number=1, rows=rows))
        columns = steps.columns()
        assert columns["kind"] == ["export", "decode", "land", "decode"]
        assert [ns / MS for ns in columns["device_ns"]] == [30, 7, 2, 3]  # another run has its own beginning
        assert (columns["batch"][1], columns["context_tokens"][1]) == (2, 32)
        assert columns["arm"] == [APART, APART, APART, "both"]
        assert columns["blocks"] == [2, 0, 2, 0]
