"""The router chooses as the paper says, and every backend sums what the chosen experts give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonshard.models.experts import moe

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]
NUM_EXPERTS, EMBED, WIDTH, LAYERS = 8, 16, 24, 2
SHAPES = [(1, 1), (1, 8), (7, 2), (64, 4), (300, 8), (300, 1)]  # (tokens, k): few, each compiles anew
RNG = np.random.default_rng(1)
EXPERTS = moe.Experts(
    gate_up=RNG.normal(size=(LAYERS, NUM_EXPERTS, 2, WIDTH, EMBED)).astype(np.float32) * 0.3,
    down=RNG.normal(size=(LAYERS, NUM_EXPERTS, EMBED, WIDTH)).astype(np.float32) * 0.3,
)
BACKENDS = {"dense": jax.jit(moe.dense), "blocks": jax.jit(moe.blocks)}
ROUTE = jax.jit(moe.route, static_argnames=("top_k", "num_groups", "top_groups", "normalise", "scale"))
ASSIGN = jax.jit(moe.assign_blocks, static_argnums=(2, 3))
EXAMPLES = settings(max_examples=25, deadline=None, derandomize=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def expected_routing(x, gate, bias, top_k, num_groups, top_groups, normalise, scale):
    """Token by token: (weights, indices, margins), experts in descending order of biased score.

    The margin is by how much the worst that was chosen beats the best that was not, among groups and among experts.
    """
    scores = sigmoid(x.astype(np.float64) @ gate.astype(np.float64).T)
    choice = scores + bias
    weights, indices, margins = [], [], []
    for token in range(len(x)):
        groups = choice[token].reshape(num_groups, -1)
        of_groups = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
        best_groups = np.argsort(-of_groups, kind="stable")[:top_groups]
        allowed = [e for e in range(len(bias)) if e // groups.shape[1] in best_groups]
        ranked = sorted(allowed, key=lambda e: -choice[token, e])
        chosen, left_out = ranked[:top_k], ranked[top_k]
        weight = scores[token, chosen]
        weights.append((weight / weight.sum() if normalise else weight) * scale)
        indices.append(chosen)
        others = np.delete(of_groups, best_groups)
        between_groups = of_groups[best_groups].min() - others.max() if len(others) else np.inf
        margins.append(min(between_groups, choice[token, chosen[-1]] - choice[token, left_out]))
    return np.asarray(weights), np.asarray(indices), np.asarray(margins)


@pytest.mark.parametrize(
    ("num_groups", "top_groups", "normalise"), [(1, 1, True), (4, 2, True), (4, 1, False), (2, 2, True)]
)
@pytest.mark.parametrize("bias_shift", [0.0, -3.0])
def test_routing_follows_biased_scores_and_weighs_by_unbiased_ones(num_groups, top_groups, normalise, bias_shift):
    rng = np.random.default_rng(3)
    x, gate = rng.normal(size=(50, EMBED)).astype(np.float32), rng.normal(size=(16, EMBED)).astype(np.float32)
    bias = (rng.normal(size=16) * 0.5 + bias_shift).astype(np.float32)
    options = {"top_k": 3, "num_groups": num_groups, "top_groups": top_groups, "normalise": normalise, "scale": 2.5}
    routing = ROUTE(x, gate, bias, **options)
    weights, indices, margins = expected_routing(x, gate, bias, *options.values())
    np.testing.assert_array_equal(routing.experts, indices)
    np.testing.assert_allclose(routing.weights, weights, atol=1e-5)
    np.testing.assert_allclose(routing.margin, margins, atol=1e-5)


def draw_case(shape, seed, skew):
    """Tokens with distinct experts each; `skew` sends all of them to the same ones, or makes some tokens invalid."""
    (tokens, k), rng = shape, np.random.default_rng(seed)
    indices = np.stack([rng.permutation(NUM_EXPERTS)[:k] for _ in range(tokens)]).astype(np.int32)
    if skew == "one expert":
        indices = np.tile(indices[:1], (tokens, 1))
    valid = rng.random(tokens) < (0.5 if skew == "invalid" else 1.1)
    x = rng.normal(size=(tokens, EMBED)).astype(np.float32)
    return x, rng.random((tokens, k)).astype(np.float32), indices, valid


def run(name, x, weights, indices, valid, layer=0):
    routing = moe.Routing(
        weights=jnp.asarray(weights),
        experts=jnp.asarray(indices),
        margin=jnp.asarray(np.full(len(x), np.inf), jnp.float32),
    )
    with jax.default_matmul_precision("highest"):
        return np.asarray(BACKENDS[name](x, routing, valid, EXPERTS, np.int32(layer)))


def brute_force(x, weights, indices, valid, layer):
    out = np.zeros(x.shape)
    for token, choice in np.ndindex(indices.shape):
        if valid[token]:
            expert = indices[token, choice]
            gate, up = EXPERTS.gate_up[layer, expert].astype(np.float64) @ x[token]
            out[token] += weights[token, choice] * (EXPERTS.down[layer, expert] @ (gate * sigmoid(gate) * up))
    return out


CASES = (st.sampled_from(SHAPES), st.integers(0, 2**32 - 1), st.sampled_from(["none", "one expert", "invalid"]))


@pytest.mark.parametrize("name", BACKENDS)
@EXAMPLES
@given(*CASES, st.integers(0, LAYERS - 1))
def test_a_backend_sums_the_weighted_outputs_of_the_chosen_experts(name, shape, seed, skew, layer):
    x, weights, indices, valid = draw_case(shape, seed, skew)
    out, expected = run(name, x, weights, indices, valid, layer), brute_force(x, weights, indices, valid, layer)
    np.testing.assert_allclose(out[valid], expected[valid], atol=2e-4)


@pytest.mark.parametrize("name", BACKENDS)
def test_an_invalid_token_of_nan_harms_no_other(name):
    x, weights, indices, valid = draw_case((64, 4), 0, "invalid")
    clean = run(name, x, weights, indices, valid)
    x[~valid] = np.nan
    np.testing.assert_array_equal(run(name, x, weights, indices, valid)[valid], clean[valid])


@EXAMPLES
@given(*CASES, st.sampled_from([8, 32]))
def test_every_pair_has_a_row_of_its_own_in_a_block_of_its_expert(shape, seed, skew, block):
    _, _, indices, valid = draw_case(shape, seed, skew)
    rows, block_experts, num_used = map(np.asarray, ASSIGN(indices, valid, NUM_EXPERTS, block))
    of_valid = np.repeat(valid, shape[1])
    taken = rows[of_valid]
    assert len(set(taken)) == len(taken)
    np.testing.assert_array_equal(block_experts[taken // block], indices.reshape(-1)[of_valid])
    assert (taken < num_used * block).all()
    assert (rows[~of_valid] == len(block_experts) * block).all()
    sizes = np.bincount(indices.reshape(-1)[of_valid], minlength=NUM_EXPERTS)
    assert num_used == sum(-(-size // block) for size in sizes)


def test_a_block_is_about_an_experts_share():
    assert [moe.block_length(n, 8) for n in (1, 64, 72, 512, 10_000)] == [8, 8, 16, 64, 128]
