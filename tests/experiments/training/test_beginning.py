"""The weights that training begins with copy already, are the same everywhere, and refuse a shape without room."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moonshard.experiments.training.run.beginning import first_weights
from moonshard.experiments.training.shape import HUGGING_FACE_CONFIG
from moonshard.models import training
from moonshard.models.model import Batch
from moonshard.models.registry import latent_model_of
from moonshard.models.weights import initialise
from moonshard.sharding.mesh import build_mesh
from moonshard.sharding.shape import MeshShape
from tests.experiments.training.rehearsal import SHAPE

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]
MODEL = latent_model_of(HUGGING_FACE_CONFIG)
SMALL = latent_model_of(SHAPE)
ONE = MeshShape(data=1)
NUM_TOKENS = 48
NUM_FACTS = 12


def likeliest(weights: Any, tokens: np.ndarray) -> np.ndarray:
    """The next token after each of a row's, by the forward pass."""
    batch = Batch(
        tokens=jnp.asarray(tokens[None]),
        positions=jnp.arange(len(tokens), dtype=jnp.int32)[None],
        block_tables=jnp.zeros((1, 1, 0), jnp.int32),
    )
    hidden, _, _ = MODEL.forward(
        weights, training.no_pages(), batch, backend=training.all_blocks, attend=training.attend_causal
    )
    return np.asarray(MODEL.unembed(weights, hidden[0]).argmax(axis=-1))


def share_copied(weights: Any, seed: int) -> float:
    """Of random tokens that come a second time: how many are foreseen."""
    once = np.random.default_rng(seed).choice(MODEL.config.vocab_size, NUM_TOKENS, replace=False).astype(np.int32)
    found = likeliest(weights, np.concatenate([once, once]))
    return float((found[NUM_TOKENS:-1] == once[1:]).mean())


@pytest.mark.slow
def test_what_came_once_is_said_again_before_any_training():
    mesh = build_mesh(ONE)
    assert share_copied(first_weights(MODEL, 0, mesh), 0) > 0.5
    assert share_copied(initialise(MODEL.declare(), 0, "float32", mesh), 0) < 0.1


@pytest.mark.parametrize("interleaves", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_circuit_is_where_the_folder_says_that_rotary_features_are(interleaves: bool):
    model = latent_model_of({**HUGGING_FACE_CONFIG, "rope_interleave": interleaves})
    config = model.config
    weights = first_weights(model, 0, build_mesh(ONE))
    assert weights.dense is not None
    looked = np.flatnonzero(np.asarray(weights.dense.attention.kv_a)[0, config.kv_lora_rank :, 0])
    assert looked.tolist() == ([0, 2, 4, 6] if interleaves else [0, 1, 2, 3])


def test_tokens_that_say_the_same_begin_alike_and_the_others_do_not():
    weights = first_weights(MODEL, 0, build_mesh(ONE), [(5, 6), (7, 8)])
    own = np.asarray(weights.embed)[5:10, 1:]
    own = own / np.linalg.norm(own, axis=1, keepdims=True)
    found = own @ own.T
    assert found[0, 1] > 0.6
    assert found[2, 3] > 0.6
    assert abs(found[0, [2, 4]]).max() < 0.3


@pytest.mark.slow
def test_they_are_the_same_on_any_number_of_devices():
    one, many = (jax.device_get(first_weights(SMALL, 3, build_mesh(MeshShape(data=size)))) for size in (1, 8))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True))


@pytest.mark.slow
def test_of_two_places_alike_the_later_is_preferred():
    weights = first_weights(MODEL, 0, build_mesh(ONE))
    said: list[str] = []
    for seed in range(12):
        tokens = np.random.default_rng(seed).choice(MODEL.config.vocab_size, 70, replace=False).astype(np.int32)
        tokens[10:14] = tokens[50:54] = tokens[-4:]
        found = likeliest(weights, tokens)[-1]
        said.append("early" if found == tokens[14] else "late" if found == tokens[54] else "other")
    assert said.count("late") > 2 * said.count("early")
    assert said.count("late") > len(said) / 2


@pytest.mark.slow
def test_among_places_with_the_same_last_token_the_one_after_the_same_name_is_found_more_often_than_by_chance():
    """Facts of a name, a word that all share, and a value. A match on the last token alone finds 1 in NUM_FACTS."""
    weights = first_weights(MODEL, 0, build_mesh(ONE))
    found = []
    for seed in range(4):
        drawn = np.random.default_rng(seed).choice(MODEL.config.vocab_size, 2 * NUM_FACTS + 1, replace=False)
        names, values, shared = np.split(drawn.astype(np.int32), [NUM_FACTS, 2 * NUM_FACTS])
        facts = np.stack([names, np.repeat(shared, NUM_FACTS), values], axis=1).reshape(-1)
        said = [likeliest(weights, np.concatenate([facts, name, shared]))[-1] for name in names[:, None]]
        found += [np.array(said) == values]
    assert np.mean(found) > 3 / NUM_FACTS


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 2, "num_key_value_heads": 2},
        {"hidden_size": 16},
        {"v_head_dim": 5},
        {"qk_nope_head_dim": 6},
        {"qk_nope_head_dim": 11},
        {"first_k_dense_replace": 0},
    ],
)
def test_a_shape_without_room_is_refused(change: dict[str, int]):
    config = latent_model_of({**SHAPE, **change})
    with pytest.raises(ValueError, match="the circuit needs"):
        first_weights(config, 0, build_mesh(ONE))
