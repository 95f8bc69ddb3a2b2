"""Times of steps: coefficients that are known come back, also where some steps waited for others."""

import msgspec
import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.reading.step_fit import COEFFICIENTS, fit_step_model, fit_steps, fit_table, predicted_ms
from moonshard.experiments.reading.step_model import StepModel, StepTimes

NUM_STEPS = 300
TIMES_OF_ALL = StepTimes(fixed_ms=2.0, row_us=300.0, pair_ns=40.0)
TIMES = st.builds(
    StepTimes,
    fixed_ms=st.sampled_from((0.0, 0.5, 4.0)),
    row_us=st.sampled_from((0.0, 20.0, 400.0)),
    pair_ns=st.sampled_from((0.0, 10.0, 80.0)),
).filter(lambda times: times.fixed_ms + times.row_us + times.pair_ns > 0)


def made_up(times: StepTimes, kind: str, seed: int, *, noise: float = 0.0, share_slow: float = 0.0) -> pl.DataFrame:
    """Steps that take what `times` says, but for noise, and but for some that take two to twenty times as long."""
    random = np.random.default_rng(seed)
    batch = random.integers(1, 9, NUM_STEPS)
    bucket = batch if kind == "decode" else 64 * random.integers(1, 9, NUM_STEPS)
    context = batch * random.integers(64, 4096, NUM_STEPS)
    rows = zip(bucket.tolist(), batch.tolist(), context.tolist(), strict=True)
    ms = np.array([times.ms(bucket=n, batch=b, context_tokens=c) for n, b, c in rows])
    ms *= np.exp(noise * random.normal(size=NUM_STEPS))
    is_slow = random.permutation(NUM_STEPS) < share_slow * NUM_STEPS
    ms = np.where(is_slow, ms * random.uniform(2, 20, NUM_STEPS), ms)
    return pl.DataFrame(
        {"kind": kind, "bucket": bucket, "batch": batch, "context_tokens": context, "device_ns": np.round(ms * 1e6)}
    ).cast({"device_ns": pl.Int64})


def coefficients(times: StepTimes) -> list[float]:
    return [times.fixed_ms, times.row_us, times.pair_ns]


@settings(max_examples=30)
@given(TIMES, st.sampled_from(("prefill", "decode")), st.integers(0, 99))
def test_steps_without_noise_give_their_coefficients_back(times: StepTimes, kind, seed: int):
    fit = fit_steps(made_up(times, kind, seed), kind)
    assert coefficients(fit.times) == pytest.approx(coefficients(times), rel=1e-3, abs=1e-3)
    assert fit.p90_error < 1e-3


@settings(max_examples=30)
@given(TIMES, st.sampled_from(("prefill", "decode")), st.integers(0, 99))
def test_a_fifth_of_steps_that_waited_changes_nothing(times: StepTimes, kind, seed: int):
    fit = fit_steps(made_up(times, kind, seed, share_slow=0.2), kind)
    assert coefficients(fit.times) == pytest.approx(coefficients(times), rel=1e-2, abs=1e-2)
    assert fit.median_error < 1e-3


@settings(max_examples=20)
@given(st.integers(0, 999))
def test_noise_moves_predictions_little(seed: int):
    times = TIMES_OF_ALL
    fit = fit_steps(made_up(times, "prefill", seed, noise=0.1, share_slow=0.1), "prefill")
    for bucket, context_tokens in ((64, 64), (512, 512), (512, 4096)):
        sizes = {"bucket": bucket, "batch": 1, "context_tokens": context_tokens}
        assert fit.times.ms(**sizes) == pytest.approx(times.ms(**sizes), rel=0.1)
    assert 0.04 < fit.median_error < 0.1


@settings(max_examples=20)
@given(st.integers(0, 999))
def test_no_coefficient_is_below_zero_whatever_was_measured(seed: int):
    """Steps that take the less the larger they are."""
    steps = made_up(StepTimes(fixed_ms=1.0, row_us=0.0, pair_ns=0.0), "prefill", seed)
    shrinking = steps.with_columns((1e9 / pl.col("bucket")).cast(pl.Int64).alias("device_ns"))
    assert min(coefficients(fit_steps(shrinking, "prefill").times)) >= 0


def test_padding_costs_what_rows_cost_and_context_counts_by_its_mean():
    times = StepTimes(fixed_ms=1.0, row_us=2.0, pair_ns=3.0)
    assert times.ms(bucket=512, batch=4, context_tokens=4000) == pytest.approx(1 + 512 * 2e-3 + 512 * 1000 * 3e-6)


def test_a_model_is_the_same_after_json_and_anything_else_is_refused_by_its_field():
    made = StepTimes(fixed_ms=1.25, row_us=300.5, pair_ns=40.0)
    frames = [made_up(made, kind, 0) for kind in ("prefill", "decode")]
    model, fits = fit_step_model(pl.concat(frames), "2 cores")
    assert StepModel.from_json(model.to_json()) == model
    assert model.source == "2 cores"
    assert fit_table(fits)["kind"].to_list() == ["prefill", "decode"]
    with pytest.raises(msgspec.ValidationError, match=r"\$\.prefill\.row_us"):
        StepModel.from_json(model.to_json().replace('"row_us": 3', '"row_us": -3'))


def test_too_few_steps_are_refused_by_their_kind():
    steps = made_up(StepTimes(fixed_ms=1.0, row_us=0.0, pair_ns=0.0), "prefill", 0)
    with pytest.raises(ExperimentError, match="0 steps of kind decode"):
        fit_step_model(steps)


@pytest.mark.parametrize(
    ("steps", "unidentified"),
    [
        (made_up(TIMES_OF_ALL, "decode", 0), ()),
        (made_up(TIMES_OF_ALL, "decode", 0).filter(bucket=4), ("each row, us",)),
        (
            made_up(TIMES_OF_ALL, "decode", 0).filter(bucket=4).head(1).sample(9, with_replacement=True),
            COEFFICIENTS[1:],
        ),
        (made_up(TIMES_OF_ALL, "decode", 0).with_columns(context_tokens=100 * pl.col("batch")), COEFFICIENTS[2:]),
        (
            made_up(TIMES_OF_ALL, "decode", 0, noise=0.1).with_columns(
                context_tokens=pl.col("batch") * (1000 + pl.int_range(pl.len()) % 20)  # nearly the same in all steps
            ),
            COEFFICIENTS[2:],
        ),
    ],
)
def test_what_steps_do_not_tell_apart_is_named_and_has_no_number(steps: pl.DataFrame, unidentified: tuple[str, ...]):
    fit = fit_steps(steps, "decode")
    assert fit.unidentified == unidentified
    (row,) = fit_table({"decode": fit}).rows(named=True)
    assert [name for name in COEFFICIENTS if row[name] is None] == list(unidentified)
    assert row["not told by these steps"] == (", ".join(unidentified) or None)


def test_a_coefficient_that_would_be_below_zero_is_told_to_be_held_there():
    steps = made_up(StepTimes(fixed_ms=9.0, row_us=0.0, pair_ns=40.0), "prefill", 0)
    shorter = steps.with_columns((pl.col("device_ns") - 5e3 * pl.col("bucket")).cast(pl.Int64).alias("device_ns"))
    fit = fit_steps(shorter, "prefill")
    assert fit.unidentified == ()
    assert fit.at_zero == ("each row, us",)
    (row,) = fit_table({"prefill": fit}).rows(named=True)
    assert row["each row, us"] == 0
    assert row["at 0, since nothing above it fits better"] == "each row, us"
    assert fit_steps(made_up(TIMES_OF_ALL, "prefill", 0), "prefill").at_zero == ()


def test_what_steps_take_undisturbed_is_by_their_sizes_alone():
    steps = pl.concat([made_up(TIMES_OF_ALL, kind, 0) for kind in ("prefill", "decode")])
    waited = steps.with_columns(device_ns=7 * pl.col("device_ns"))
    model, _ = fit_step_model(steps)
    moved = steps.head(1).with_columns(kind=pl.lit("land"))
    found = predicted_ms(pl.concat([waited, moved]), model)
    assert found.height == steps.height
    assert found["predicted_ms"].to_list() == pytest.approx((steps["device_ns"] / 1e6).to_list(), rel=1e-3)
