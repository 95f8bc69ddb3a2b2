"""The weights before the first step: random, but with the circuit for copying laid in.

Copying a fact takes two heads that are of no use alone: one that says which token came before, and one that looks for
the place where what is being said came before, and says on. Found by chance, they cost millions of tokens; laid in,
they are trained like everything else. The first layer gets the one, the second layer the other, each writing where the
next reads:

- feature 0 of every embedding is the same constant, so that a head can look at positions alone,
- features 1 to `width` of the embeddings are empty; there the first layer's head 0 writes the token before,
- the head of the model begins as its embeddings, so that a token copied is a token said.

Sources: In-context Learning and Induction Heads (Olsson et al. 2022, arXiv 2209.11895) for the circuit; Mimetic
Initialization of Self-Attention Layers (arXiv 2305.09828) for beginning with what training finds.
"""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from moonshard.models import kimi
from moonshard.models.weights import initialise
from moonshard.sharding.arrays import Array
from moonshard.sharding.rules import replicated

CONSTANT = 4.0  # the embeddings' feature 0; the others have unit variance: smaller ones drown in what layers add
SMALL_ATTENTION, SMALL_FEED_FORWARD = 0.5, 0.3  # what layers write at first, beside the usual
OFFSETS = (1, 2, 3)  # how far back the first layer's heads look; only head 0 has somewhere to write it
SHARPNESS = 5.0  # of a look back: logits per pair of rotary features
NUM_SHARP_PAIRS = 4  # the fastest rotations tell near positions apart
NUM_MATCHING_HEADS = 2
MATCH_GAIN = 3.0  # among 96 random tokens a match then gets 0.8 of the weight; 0.6 with 2
LOUDNESS = 4.0  # of what was found, beside the current token, which the head says with 1
QUIET_ROPE = 0.3  # matching is by content


def first_weights(config: kimi.KimiConfig, seed: int, mesh: Mesh) -> kimi.Weights[Array]:
    """Weights in float32, on every device.

    Raises:
        ValueError: the shape has no room for the circuit.
    """
    _check_room(config)
    weights = jax.device_get(initialise(kimi.declare(config), seed, "float32", mesh))
    weights = _lay_in(config, jax.tree.map(np.array, weights), np.random.default_rng(seed))
    return jax.device_put(weights, replicated(mesh))


def _check_room(config: kimi.KimiConfig) -> None:
    has_layers = config.num_dense_layers > 0 and config.num_moe_layers > 0
    has_features = config.hidden_size - 1 >= 2 * _width(config)
    if not has_layers or not has_features or config.num_attention_heads < len(OFFSETS):
        raise ValueError("the circuit needs a dense and a sparse layer, three heads and half the embedding's features")


def _width(config: kimi.KimiConfig) -> int:
    """Of what the heads tell one another: a half of the latent for what is looked for, a half for what is said."""
    return min(config.kv_lora_rank // 2, config.v_head_dim)


def _lay_in(config: kimi.KimiConfig, weights: Any, random: np.random.Generator) -> kimi.Weights[Any]:
    width = _width(config)
    own = np.arange(1 + width, config.hidden_size)  # features that say which token this is
    _make_small(weights)
    weights.embed[:] *= config.hidden_size**0.5
    weights.embed[:, 0] = CONSTANT
    weights.embed[:, 1 : 1 + width] = 0.0
    seen, said = (_reading(random, own, width, config.hidden_size) for _ in range(2))
    _look_back(config, weights.dense.attention, seen, width)
    _match(config, weights.sparse.attention, seen, said, width, random)
    return replace(weights, head=weights.embed / config.hidden_size**0.5)


def _make_small(weights: Any) -> None:
    for stack in (weights.dense, weights.sparse):
        stack.attention.out[:] *= SMALL_ATTENTION
        stack.mlp.down[:] *= SMALL_FEED_FORWARD
    weights.experts.down[:] *= SMALL_FEED_FORWARD


def _reading(random: np.random.Generator, own: np.ndarray, width: int, hidden_size: int) -> np.ndarray:
    """A random orthogonal projection [width, d] of the token's own features, of unit variance."""
    rows = np.zeros((width, hidden_size), np.float32)
    rows[:, own] = _orthogonal(random, len(own), width).T
    return rows * np.float32((hidden_size / len(own)) ** 0.5)


def _orthogonal(random: np.random.Generator, num_rows: int, num_columns: int) -> np.ndarray:
    return np.linalg.qr(random.normal(size=(num_rows, num_columns)))[0].astype(np.float32)


def _look_back(config: kimi.KimiConfig, layer: Any, seen: np.ndarray, width: int) -> None:
    """Heads of the first layer attend to the token 1, 2, 3 places before; head 0 writes what it sees there."""
    rank, nope = config.kv_lora_rank, config.qk_nope_head_dim
    frequencies, _ = kimi.rotary_frequencies(config)
    pairs = min(NUM_SHARP_PAIRS, len(frequencies))
    first, second = _pairs(config, pairs)
    constant = CONSTANT / (1 + CONSTANT**2 / config.hidden_size) ** 0.5  # after the norm
    gain = (SHARPNESS / kimi.softmax_scale(config)) ** 0.5 / constant
    layer.kv_a[0, :width] = seen
    layer.kv_a[0, rank:] = 0.0
    layer.kv_a[0, rank + first, 0] = gain
    for head, offset in enumerate(OFFSETS):
        angles = -offset * frequencies[:pairs]
        layer.q_b[0, head] *= 0.1
        layer.q_b[0, head, nope:] = 0.0
        layer.q_b[0, head, nope + first, 0] = gain * np.cos(angles)
        layer.q_b[0, head, nope + second, 0] = gain * np.sin(angles)
    layer.v_up[0, 0] = np.eye(config.v_head_dim, rank)
    layer.out[0, 1 : 1 + width] = 0.0
    layer.out[0, 1 : 1 + width, 0] = np.eye(width, config.v_head_dim)


def _match(
    config: kimi.KimiConfig, layer: Any, seen: np.ndarray, said: np.ndarray, width: int, random: np.random.Generator
) -> None:
    """Heads of the second layer attend to tokens whose predecessor is the current token, and write those tokens."""
    rank, nope = config.kv_lora_rank, config.qk_nope_head_dim
    layer.kv_a[0, :width] = np.eye(width, config.hidden_size, 1)
    layer.kv_a[0, width : 2 * width] = said
    layer.kv_a[0, rank:] *= QUIET_ROPE
    for head in range(NUM_MATCHING_HEADS):
        sketch = _orthogonal(random, max(width, nope), min(width, nope))
        sketch = sketch.T if nope <= width else sketch  # [nope, width]
        layer.k_up[0, head] = 0.0
        layer.k_up[0, head, :, :width] = sketch
        layer.q_b[0, head, :nope] = MATCH_GAIN * sketch @ seen
        layer.v_up[0, head] = 0.0
        layer.v_up[0, head, :width, width : 2 * width] = np.eye(width)
        layer.out[0, :, head] = 0.0
        layer.out[0, :, head, :width] = LOUDNESS * said.T


def _pairs(config: kimi.KimiConfig, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the two features of each of the first rotations lie among the rotary ones."""
    places = np.arange(count)
    if config.rope_interleave:
        return 2 * places, 2 * places + 1
    return places, places + config.qk_rope_head_dim // 2
