"""Predicted times to the first token: against times that follow a line, against a brute-force fit, and never absurd."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.serving.control.ttft.model import FIT_EVERY, MAX_SAMPLES, MIN_SAMPLES, TtftModel, fit

TOKENS = st.integers(0, 100_000)


def taught(samples, worker: str = "a") -> TtftModel:
    model = TtftModel()
    for own, queued, seconds in samples:
        model.observe(worker, own_tokens=own, queued_tokens=queued, ttft_s=seconds)
    return model


def line(own: int, queued: int) -> float:
    return 0.01 + own * 1e-4 + queued * 2e-4


def test_nothing_is_said_before_enough_was_seen():
    samples = [(100 * i, 50 * i, line(100 * i, 50 * i)) for i in range(MIN_SAMPLES - 1)]
    model = taught(samples)
    assert model.predict_s("a", own_tokens=1, queued_tokens=1) is None
    model.observe("a", own_tokens=5, queued_tokens=900, ttft_s=line(5, 900))
    assert model.predict_s("a", own_tokens=1, queued_tokens=1) is not None


def test_a_worker_of_which_too_little_was_seen_is_taken_to_be_like_the_others():
    model = taught([(100 * i, 50 * i, line(100 * i, 50 * i)) for i in range(MIN_SAMPLES)])
    like_a = pytest.approx(line(700, 80), rel=1e-6)
    assert model.predict_s("b", own_tokens=700, queued_tokens=80) == like_a
    for i in range(MIN_SAMPLES):
        assert model.predict_s("b", own_tokens=700, queued_tokens=80) != pytest.approx(5.0)
        model.observe("b", own_tokens=i, queued_tokens=i, ttft_s=5.0)
    assert model.predict_s("b", own_tokens=700, queued_tokens=80) == pytest.approx(5.0)
    assert model.predict_s("a", own_tokens=700, queued_tokens=80) == like_a
    model.forget("b")
    assert model.predict_s("b", own_tokens=700, queued_tokens=80) != pytest.approx(5.0)


@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=MIN_SAMPLES, max_size=40, unique=True), TOKENS, TOKENS)
def test_times_on_a_line_are_predicted_from_few_samples(points: list[tuple[int, int]], own: int, queued: int):
    spread = [*points, (0, 0), (100_000, 0), (0, 100_000)]
    model = taught([(*point, line(*point)) for point in spread])
    assert model.predict_s("a", own_tokens=own, queued_tokens=queued) == pytest.approx(line(own, queued), rel=1e-6)


@given(
    st.lists(st.tuples(TOKENS, TOKENS, st.floats(0, 100)), min_size=MIN_SAMPLES, max_size=60), TOKENS, TOKENS, TOKENS
)
def test_a_prediction_is_never_negative_and_never_less_for_more_tokens(samples, own: int, queued: int, more: int):
    model = taught(samples)
    found = model.predict_s("a", own_tokens=own, queued_tokens=queued)
    assert found is not None
    assert found >= 0
    for larger in ((own + more, queued), (own, queued + more)):
        then = model.predict_s("a", own_tokens=larger[0], queued_tokens=larger[1])
        assert then is not None
        assert then >= found


def test_the_fit_is_the_best_of_those_without_a_negative_weight():
    random = np.random.default_rng(0)
    for _ in range(20):
        features = np.column_stack([np.ones(30), random.uniform(0, 10, 30), random.uniform(0, 10, 30)])
        seconds = random.uniform(0, 1, 30) + features @ random.uniform(-0.2, 0.5, 3)
        found = fit(features, seconds)
        assert found.min() >= 0
        error = ((features @ found - seconds) ** 2).sum()
        for weights in random.uniform(0, 0.6, (2000, 3)):
            assert error <= ((features @ weights - seconds) ** 2).sum() + 1e-9


def test_what_has_changed_is_learned_anew():
    model = taught([(i, 0, 1e-3 * i) for i in range(MAX_SAMPLES)])
    assert model.predict_s("a", own_tokens=1000, queued_tokens=0) == pytest.approx(1.0)
    for i in range(MAX_SAMPLES + FIT_EVERY):
        model.observe("a", own_tokens=i, queued_tokens=0, ttft_s=5e-3 * i)
    assert model.predict_s("a", own_tokens=1000, queued_tokens=0) == pytest.approx(5.0)


def test_a_slow_spell_is_forgotten_within_a_hundred_prompts():
    spell, since = [(100, 0, 5.0)] * MAX_SAMPLES, [(100, 0, 0.05)] * 100
    found = taught([*spell, *since]).predict_s("a", own_tokens=100, queued_tokens=10)
    assert found == pytest.approx(0.05, abs=0.5)
