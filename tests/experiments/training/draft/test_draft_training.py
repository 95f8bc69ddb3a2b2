"""The draft is trained on the rows that it will serve with, its folder opens, and its acceptance is what it says."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moonshard.experiments.training.draft.acceptance import Simulation, accept_length, answered
from moonshard.experiments.training.draft.beginning import first_weights
from moonshard.experiments.training.draft.learn import DRAFT, MATRICES, pocket_draft, write
from moonshard.experiments.training.draft.objective import NUM_GUESSES, Objective
from moonshard.experiments.training.greedy import GreedyModel
from moonshard.experiments.training.texts.corpus import POCKET
from moonshard.experiments.training.texts.tools.tasks import MAX_CONTEXT_TOKENS, tool_tasks
from moonshard.models.draft import lend
from moonshard.models.eagle.weights import LlamaAttention
from moonshard.models.model import LatentModel
from moonshard.models.registry import open_draft, open_model
from moonshard.models.weights import is_param
from tests.models.drafts import Drafting

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]
MAX_PARAMETERS = 1_000_000


@pytest.fixture(scope="module")
def model() -> LatentModel:
    _, model = open_model(POCKET)
    assert isinstance(model, LatentModel)
    return model


@pytest.fixture(scope="module")
def tables(model):
    random = np.random.default_rng(0)
    shape = (model.config.vocab_size, model.config.hidden_size)

    class Tables:
        embed, head = (jnp.asarray(random.normal(size=shape), jnp.float32) for _ in range(2))

    return Tables


def test_further_rows_in_training_are_the_steps_of_a_chain(model, tables):
    draft = pocket_draft(model)
    own = jax.tree.map(jnp.asarray, first_weights(draft, 0))
    own = replace(own, mlp=replace(own.mlp, down=10 * own.mlp.down))
    loaded = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), lend(own, tables))
    random = np.random.default_rng(1)
    tokens = random.integers(0, model.config.vocab_size, 12).astype(np.int32)
    features = random.normal(size=(12, draft.feature_size)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        given = (jnp.asarray(tokens)[None], jnp.arange(12, dtype=jnp.int32)[None], jnp.asarray(features)[None])
        trained = [np.asarray(each)[0] for each in Objective(model, draft).guesses(loaded, *given)]
    assert len(trained) == NUM_GUESSES
    for last in (0, 5, 9):
        serving = Drafting(draft, loaded)
        hidden = serving.extend(tokens[: last + 1], features[: last + 1])[-1]
        for ahead in range(NUM_GUESSES):
            np.testing.assert_allclose(trained[ahead][last + ahead], hidden, atol=1e-4)
            if last + ahead + 1 < len(tokens):
                hidden = serving.step(int(tokens[last + ahead + 1]), hidden, last + ahead + 1)


def test_a_trained_draft_s_folder_opens_for_its_model_with_the_values_that_were_written(model, tmp_path):
    draft = pocket_draft(model)
    own = first_weights(draft, 0)
    assert isinstance(own.attention, LlamaAttention)
    write(draft, own, tmp_path)
    checkpoint, _ = open_model(POCKET)
    source, opened = open_draft(tmp_path, model, checkpoint)
    assert opened == draft
    q = source.tensor("midlayer.self_attn.q_proj.weight").astype(np.float32)
    np.testing.assert_allclose(q.reshape(own.attention.q.shape), own.attention.q, atol=0.02)


def test_the_draft_is_small_and_every_matrix_is_moved_as_one(model):
    leaves = jax.tree_util.tree_flatten_with_path(pocket_draft(model).declare(), is_leaf=is_param)[0]
    assert sum(np.prod(param.shape) for _, param in leaves) <= MAX_PARAMETERS
    assert {path[-1].name for path, param in leaves if param.is_factor} == set(MATRICES)


def test_the_embedded_draft_opens_for_the_embedded_model(model):
    checkpoint, _ = open_model(POCKET)
    _, opened = open_draft(DRAFT, model, checkpoint)
    assert opened == pocket_draft(model)


@pytest.mark.slow
def test_a_step_on_held_out_tool_calls_gives_more_than_three_tokens():
    model = GreedyModel(POCKET, "float32", MAX_CONTEXT_TOKENS)
    some = answered([task for task in tool_tasks(3, 8) if task.rounds], model)
    length, shares, num_steps = accept_length(Simulation(DRAFT), some)
    assert num_steps > 20
    assert length == pytest.approx(1 + sum(shares))
    assert 3.2 <= length <= 4
