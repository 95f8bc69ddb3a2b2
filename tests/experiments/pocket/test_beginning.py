"""The weights that training begins with copy already, are the same everywhere, and refuse a shape without room."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moonshard.experiments.pocket.beginning import first_weights
from moonshard.experiments.pocket.shape import HUGGING_FACE_CONFIG
from moonshard.models import kimi, training
from moonshard.models.weights import initialise
from moonshard.sharding.rules import build_mesh
from moonshard.sharding.shape import MeshShape
from tests.experiments.pocket.rehearsal import SHAPE

pytestmark = pytest.mark.xdist_group("jax")
CONFIG = kimi.KimiConfig.from_hugging_face(HUGGING_FACE_CONFIG)
SMALL = kimi.KimiConfig.from_hugging_face(SHAPE)
ONE = MeshShape(data=1)
NUM_TOKENS = 48


def likeliest(weights: kimi.Weights[jax.Array], tokens: np.ndarray) -> np.ndarray:
    """The next token after each of a row's, by the forward pass."""
    batch = kimi.Batch(
        tokens=jnp.asarray(tokens[None]),
        positions=jnp.arange(len(tokens), dtype=jnp.int32)[None],
        block_tables=jnp.zeros((1, 0), jnp.int32),
    )
    hidden, _, _ = kimi.forward(
        CONFIG, weights, training.no_pages(), batch, backend=training.all_blocks, attend=training.attend_causal
    )
    return np.asarray(kimi.unembed(weights, hidden[0]).argmax(axis=-1))


def share_copied(weights: kimi.Weights[jax.Array], seed: int) -> float:
    """Of random tokens that come a second time: how many are foreseen."""
    once = np.random.default_rng(seed).choice(CONFIG.vocab_size, NUM_TOKENS, replace=False).astype(np.int32)
    found = likeliest(weights, np.concatenate([once, once]))
    return float((found[NUM_TOKENS:-1] == once[1:]).mean())


def test_what_came_once_is_said_again_before_any_training():
    mesh = build_mesh(ONE)
    assert share_copied(first_weights(CONFIG, 0, mesh), 0) > 0.5
    assert share_copied(initialise(kimi.declare(CONFIG), 0, "float32", mesh), 0) < 0.1


@pytest.mark.parametrize("interleaves", [True, False])
def test_the_circuit_is_where_the_folder_says_that_rotary_features_are(interleaves: bool):
    config = replace(CONFIG, rope_interleave=interleaves)
    weights = first_weights(config, 0, build_mesh(ONE))
    assert weights.dense is not None
    looked = np.flatnonzero(np.asarray(weights.dense.attention.kv_a)[0, config.kv_lora_rank :, 0])
    assert looked.tolist() == ([0, 2, 4, 6] if interleaves else [0, 1, 2, 3])


def test_they_are_the_same_on_any_number_of_devices():
    one, many = (jax.device_get(first_weights(SMALL, 3, build_mesh(MeshShape(data=size)))) for size in (1, 8))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True))


def test_a_shape_without_room_is_refused():
    for change in ({"num_attention_heads": 2, "num_key_value_heads": 2}, {"hidden_size": 16}):
        config = kimi.KimiConfig.from_hugging_face({**SHAPE, **change})
        with pytest.raises(ValueError, match="the circuit needs"):
            first_weights(config, 0, build_mesh(ONE))
