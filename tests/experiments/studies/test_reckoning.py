"""The predicted shares of gaps equal those from counting, and the study's README has the numbers that are computed."""

import re
from pathlib import Path

import pytest

from moonshard.experiments.reading.step_model import StepModel, StepTimes
from moonshard.experiments.studies.pd_vs_aggregated.reckoning import CHUNKS, PROMPT_TOKENS, reckoned

STUDY = Path(__file__).parents[3] / "experiments" / "studies" / "pd_vs_aggregated"
MODEL = StepModel.from_json((STUDY / "step_times.json").read_bytes())


@pytest.mark.parametrize("rate_per_s", [0.4, 1.2, 2.0])
@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_shares_are_those_of_gaps_that_are_counted(chunk_tokens: int, rate_per_s: float):
    """Long prompts come to one of two devices in even intervals; one stream's gaps there, one after another."""
    found = reckoned(MODEL, chunk_tokens)
    num_with = num_without = 0
    interval_ms = 1e3 * 2 / (0.25 * rate_per_s)
    at_ms, left, next_ms = 0.0, 0, 0.0
    for _ in range(200_000):
        if at_ms >= next_ms:
            left, next_ms = left + found.num_chunks, next_ms + interval_ms
        if left:
            left, num_with, at_ms = left - 1, num_with + 1, at_ms + found.cycle_ms
        else:
            num_without, at_ms = num_without + 1, at_ms + found.decode_ms
    assert found.share_of_gaps(rate_per_s) == pytest.approx(num_with / (num_with + num_without), rel=0.02)


def test_the_rate_at_which_a_share_is_reached_is_that_rate():
    found = reckoned(MODEL, 256)
    for share in (0.01, 0.1, 0.3):
        assert found.share_of_gaps(found.rate_seen(share)) == pytest.approx(share)


def test_a_prompt_costs_what_its_chunks_do():
    times = StepTimes(fixed_ms=1.0, row_us=10.0, pair_ns=0.0)
    whole = reckoned(StepModel(prefill=times, decode=times), PROMPT_TOKENS)
    assert (whole.num_chunks, whole.prefill_ms) == (1, pytest.approx(1.0 + PROMPT_TOKENS / 100))
    in_two = reckoned(StepModel(prefill=times, decode=times), PROMPT_TOKENS - 1)
    assert (in_two.num_chunks, in_two.prefill_ms) == (2, pytest.approx(whole.prefill_ms + 1.0))
    assert whole.rate_full == pytest.approx(1e3 / (0.25 * whole.prefill_ms))


def test_the_readme_says_what_comes_out():
    small, middle, large = (reckoned(MODEL, size) for size in CHUNKS)
    said = " ".join((STUDY / "README.md").read_text().split())
    rates = [f"{one.rate_seen():.1f}" for one in (middle, large)]
    full = {f"{one.rate_full:.1f}" for one in (middle, large)}
    assert len(full) == 1
    assert f"{rates[0]} requests/s with chunks of 256 tokens and at {rates[1]} with 512" in said
    assert f"the device that prefills is full at {full.pop()}." in said
    assert f"With chunks of 128 they do at {small.rate_seen():.1f}." in said
    shares = [f"{one.share_of_gaps(1.6):.0%}".rstrip("%") for one in (small, middle, large)]
    assert re.search(rf"the same reckoning gives {shares[0]}, {shares[1]} and {shares[2]}%", said)
