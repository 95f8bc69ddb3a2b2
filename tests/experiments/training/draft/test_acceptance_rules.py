"""What each rule accepts, against as many draws of both laws as it takes."""

import jax.numpy as jnp
import numpy as np
import pytest

from moonshard.experiments.training.draft.acceptance_rules import LIKELIEST, accepted

NUM_DRAWS = 200_000
VOCAB = 7  # with as many tokens more that nobody draws as the sum looks at


def softmax(x: np.ndarray) -> np.ndarray:
    grown = np.exp(x - x.max())
    return grown / grown.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_each_rule_accepts_as_often_as_draws_do(seed, temperature):
    random = np.random.default_rng(seed)
    target, draft = 2 * random.normal(size=(2, VOCAB + LIKELIEST))
    target[VOCAB:] = draft[VOCAB:] = -1e4
    greedy, coupled, rejection = (
        float(each[0]) for each in accepted(jnp.array([target]), jnp.array([draft]), temperature)
    )
    p, q = softmax(target / temperature), softmax(draft / temperature)
    noise = random.gumbel(size=(NUM_DRAWS, len(p)))
    drawn = (target / temperature + noise).argmax(axis=-1)
    assert greedy == pytest.approx((drawn == q.argmax()).mean(), abs=0.005)
    assert coupled == pytest.approx((drawn == (draft / temperature + noise).argmax(axis=-1)).mean(), abs=0.005)
    guessed = random.choice(len(q), NUM_DRAWS, p=q)
    kept = random.uniform(size=NUM_DRAWS) * q[guessed] < p[guessed]
    assert rejection == pytest.approx(kept.mean(), abs=0.005)
