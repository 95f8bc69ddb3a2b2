"""A step learns from what counts, moves every matrix as a matrix, and is the same on any number of devices."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moonshard.experiments.training.run.optimiser import balance_speed, learning_rate, matrices
from moonshard.experiments.training.run.recipe import Recipe, Restart, Rows, TrainingStage
from moonshard.experiments.training.run.step import StepSums, TrainState, build_predict, build_step, first_state, place
from moonshard.models.registry import latent_model_of
from moonshard.models.weights import is_param
from moonshard.sharding.mesh import build_mesh
from moonshard.sharding.shape import MeshShape
from tests.experiments.training.rehearsal import RECIPE, SHAPE, Repeats

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]
MODEL = latent_model_of(SHAPE)
PADDING = 2  # tokens at the end of each of the rehearsal's rows
ADAMW = replace(RECIPE, optimiser="adamw")  # Newton-Schulz and Adam's first step magnify rounding: moments are compared


def take_step(rows: Rows, recipe: Recipe = RECIPE, num_devices: int = 1) -> tuple[TrainState, TrainState, StepSums]:
    """The first state, the one after a step, and what the step reports; on the host."""
    mesh = build_mesh(MeshShape(data=num_devices))
    state = first_state(recipe, MODEL, mesh)
    before = jax.device_get(state)
    with jax.default_matmul_precision("highest"):
        after, report = build_step(recipe, MODEL, mesh)(state, place(rows, mesh))
    return before, jax.device_get(after), jax.device_get(report)


@pytest.fixture(scope="module")
def rows() -> Rows:
    return Repeats().rows(RECIPE.stages[0], 0)


@pytest.fixture(scope="module")
def three_rows() -> Rows:
    return Repeats().rows(replace(RECIPE.stages[0], num_rows=3), 0)


@pytest.fixture(scope="module")
def stepped(rows: Rows) -> tuple[TrainState, TrainState, StepSums]:
    return take_step(rows)


def bias_of(state: TrainState) -> np.ndarray:
    sparse = state.weights.sparse
    assert sparse is not None
    assert sparse.router is not None
    return np.asarray(sparse.router.bias)


def assert_same(ours: object, expected: object, atol: float) -> None:
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=atol)


@pytest.mark.slow
def test_many_devices_take_the_step_that_one_would(rows, stepped):
    _, after, report = take_step(rows, num_devices=8)
    assert_same(report.sums, stepped[2].sums, 1e-3)
    one, many = take_step(rows, ADAMW)[1], take_step(rows, ADAMW, num_devices=8)[1]
    assert_same(many.optimiser, one.optimiser, 1e-5)
    assert_same(bias_of(after), bias_of(stepped[1]), 1e-7)


@pytest.mark.slow
def test_rows_that_do_not_divide_by_the_devices_make_the_step_that_one_device_would(three_rows):
    _, one, expected = take_step(three_rows, ADAMW)
    for num_devices in (2, 8):  # one row of padding, and devices that get nothing else
        _, many, report = take_step(three_rows, ADAMW, num_devices=num_devices)
        assert report.sums.num_answer_tokens == (three_rows.weights >= 1).sum()
        assert_same(report.sums, expected.sums, 1e-3)
        assert_same(many.optimiser, one.optimiser, 1e-5)
        assert_same(bias_of(many), bias_of(one), 1e-7)


@pytest.mark.slow
def test_rows_that_do_not_divide_by_the_devices_are_predicted_as_on_one(three_rows):
    def predict(num_devices: int) -> np.ndarray:
        mesh = build_mesh(MeshShape(data=num_devices))
        weights = first_state(RECIPE, MODEL, mesh).weights
        with jax.default_matmul_precision("highest"):
            return build_predict(RECIPE, MODEL, mesh)(weights, three_rows)

    one = predict(1)
    assert one.shape == three_rows.positions.shape
    np.testing.assert_array_equal(predict(2), one)


@pytest.mark.slow
def test_loads_count_each_choice_of_a_real_token_once(rows, stepped):
    num_real = rows.tokens[:, :-1].size - PADDING * len(rows.tokens)
    loads = stepped[2].sums.loads
    np.testing.assert_allclose(loads.sum(axis=1), num_real * MODEL.config.num_experts_per_tok)
    assert (loads > 0).sum() > MODEL.config.num_experts_per_tok


@pytest.mark.slow
def test_the_routers_bias_moves_against_the_load_and_by_nothing_else(stepped):
    before, after, report = stepped
    loads = report.sums.loads
    moved = bias_of(after) - bias_of(before)
    expected = RECIPE.balance_speed * np.sign(loads.mean(axis=1, keepdims=True) - loads)
    np.testing.assert_allclose(moved, expected, atol=1e-9)
    assert (moved < 0).any()
    assert (moved > 0).any()


@pytest.mark.slow
def test_padding_teaches_nothing(rows, stepped):
    tokens = rows.tokens.copy()
    tokens[:, -PADDING:] = 7
    _, after, report = take_step(replace(rows, tokens=tokens))
    assert_same(report.sums, stepped[2].sums, 0)
    assert_same(after.weights, stepped[1].weights, 0)


@pytest.mark.slow
def test_loss_is_of_answers_and_context_counts_by_its_weight(rows, stepped):
    sums = stepped[2].sums
    assert sums.num_answer_tokens == (rows.weights >= 1).sum()
    np.testing.assert_allclose(sums.weight, rows.weights.sum(), rtol=1e-6)
    assert sums.answer_loss < sums.loss < sums.answer_loss * 1.3


@pytest.mark.slow
def test_every_matrix_of_the_checkpoint_gets_an_orthogonal_update_of_its_own():
    recipe = replace(RECIPE, weight_decay=0.0, num_warmup_steps=1, max_gradient_norm=1e9)
    params = MODEL.declare()
    before, after, _ = take_step(
        Repeats().rows(TrainingStage(name="wide", num_tokens=64, num_rows=16, num_steps=1), 0), recipe
    )
    moved = jax.tree.map(lambda new, old: (new - old) / recipe.learning_rate, after.weights, before.weights)
    names = set()
    for (path, param), leaf in zip(
        jax.tree_util.tree_flatten_with_path(params, is_leaf=is_param)[0], jax.tree.leaves(moved), strict=True
    ):
        if path[-1].name not in ("q_b", "kv_a", "k_up", "v_up", "out", "gate_up", "down"):
            continue
        names.add(path[-1].name)
        stacked = np.asarray(leaf).reshape(-1, *param.shape[param.stacked :])
        for tensor in stacked:
            rows_out = tensor.shape[0] if path[-1].name == "out" else int(np.prod(tensor.shape[:-1]))
            matrix = tensor.reshape(rows_out, -1)
            values = np.linalg.svd(matrix, compute_uv=False) / (0.2 * np.sqrt(max(matrix.shape)))
            assert values.max() < 1.3, path
            assert np.median(values) > 0.5, path
    assert len(names) == 7


@pytest.mark.slow
def test_gates_go_a_fifth_as_far_as_tables(stepped):
    before, after, _ = stepped
    table = np.abs(after.weights.head - before.weights.head).max()  # Adam's first step takes every entry as far
    gate = np.abs(after.weights.sparse.router.gate - before.weights.sparse.router.gate).max()
    np.testing.assert_allclose(gate, table / 5, rtol=1e-3)


def test_every_leaf_is_a_matrix_a_table_a_norm_or_a_gate():
    params, dimensions = MODEL.declare(), matrices(MODEL.declare())
    left = {
        path[-1].name
        for path, _ in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_param)[0]
        if _at(dimensions, path) is None
    }
    assert left == {"embed", "head", "gate", "bias", "norm", "kv_a_norm", "mlp_norm"}


def _at(tree, path):
    for key in path:
        tree = getattr(tree, key.name)
    return tree


def test_the_learning_rate_warms_up_stays_and_ends_at_nothing():
    recipe = Recipe(stages=(TrainingStage(name="all", num_tokens=1, num_rows=1, num_steps=400),), num_warmup_steps=100)
    rates = np.asarray(jax.vmap(learning_rate(recipe))(jnp.arange(401))) / recipe.learning_rate
    np.testing.assert_allclose(rates[[0, 49, 99, 299, 300, 350, 400]], [0.01, 0.5, 1, 1, 1, 0.5, 0], atol=1e-6)


def test_a_restart_begins_the_schedule_anew_lower_and_keeps_on_balancing():
    stages = (TrainingStage(name="all", num_tokens=1, num_rows=1, num_steps=600),)
    restart = Restart(step=400, rate=0.5, least_balance=0.2)
    once = Recipe(stages=(replace(stages[0], num_steps=400),), num_warmup_steps=20)
    again = replace(once, stages=stages, restarts=(restart,))
    steps = jnp.arange(601)
    rates = np.asarray(jax.vmap(learning_rate(again))(steps)) / again.learning_rate
    speeds = np.asarray(jax.vmap(balance_speed(again))(steps)) / again.balance_speed
    np.testing.assert_array_equal(rates[:400], np.asarray(jax.vmap(learning_rate(once))(steps))[:400] / 2e-3)
    np.testing.assert_allclose(rates[[400, 409, 419, 550, 575, 600]], [0.025, 0.25, 0.5, 0.5, 0.25, 0], atol=1e-6)
    np.testing.assert_allclose(speeds[[350, 399, 400, 575, 590, 600]], [0.5, 0.01, 1, 0.5, 0.2, 0.2], atol=1e-6)


def test_stages_follow_one_another_and_count_their_tokens():
    assert [RECIPE.stage_of(step).name for step in (0, 11, 12, 39)] == ["short", "short", "long", "long"]
    with pytest.raises(IndexError):
        RECIPE.stage_of(40)
    assert [RECIPE.tokens_until(step) for step in (0, 12, 13, 40)] == [0, 1536, 1728, RECIPE.num_tokens]
