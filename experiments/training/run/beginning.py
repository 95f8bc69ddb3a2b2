"""The weights before the first step: random, but with the circuit for copying laid in.

Copying a fact takes two layers that are of no use alone: one that says which tokens came before, and one that looks for
the place where what is being said came before, and says on. Found by chance, they cost millions of tokens; laid in,
they are trained like everything else. Looking for the last token alone finds any Miller where Silas Miller was meant,
so the last four are looked for together. Each layer writes where the next reads:

- feature 0 of every embedding is the same constant, so that a head can look at positions alone,
- the features after it are empty; there the first layer's heads, which look 1 to 4 tokens back, write what they see:
  the nearest token into `previous`, all of them together into `bag`,
- the second layer's heads look for the place whose `previous` is the present token, and whose `bag` has most in common
  with the present token and its own; one of them prefers the near,
- the head of the model begins as its embeddings, so that a token copied is a token said.

Sources: In-context Learning and Induction Heads (Olsson et al. 2022, arXiv 2209.11895) for the circuit; Mimetic
Initialization of Self-Attention Layers (arXiv 2305.09828) for beginning with what training finds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh

from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.model import LatentModel
from moonshard.models.weights import check_shapes, initialise, load
from moonshard.sharding.mesh import replicated

CONSTANT = 4.0  # the embeddings' feature 0; the others have unit variance: smaller ones drown in what layers add
SMALL_ATTENTION, SMALL_FEED_FORWARD = 0.5, 0.3  # what layers write at first, beside the usual
OFFSETS = (1, 2, 3, 4)  # how far back the first layer's heads look
SHARPNESS = 5.0  # of a look back: logits per pair of rotary features
NUM_SHARP_PAIRS = 4  # the fastest rotations tell near positions apart
UNLIKE = 0.6  # how much of a token is the common direction, where it is alike another
IN_BAG = 0.5  # how loud a token is among the others in the bag
NUM_MATCHING_HEADS = 2
BAG_GAIN, PREVIOUS_GAIN = 3.0, 2.7  # logits of a match are these times what two sketches have in common
LOUDNESS = 7.0  # of what was found, beside the current token, which the head says with 1
QUIET_ROPE = 0.3  # matching is by content
NUM_SLOW_PAIRS = 5  # rotations by which the near counts more than the far: of the model's 16, 0.06 to 0.004 a token
RECENCY = 0.7  # logits per slow pair; the last of the matching heads prefers a match 10 tokens back to one 50 back by 2


@dataclass(frozen=True, slots=True)
class _Room:
    """Which features of the embedding [d] and of the second layer's latent each part of the circuit uses."""

    bag: int  # widths
    previous: int
    said: int
    own: np.ndarray  # features that say which token this is

    @classmethod
    def of(cls, model: LatentModel) -> Self:
        rank = model.config.kv_lora_rank
        bag, previous = 3 * rank // 8, rank // 4
        return cls(bag=bag, previous=previous, said=bag, own=np.arange(1 + previous + bag, model.config.hidden_size))

    @property
    def previous_features(self) -> np.ndarray:
        return np.arange(1, 1 + self.previous)

    @property
    def bag_features(self) -> np.ndarray:
        return np.arange(1 + self.previous, 1 + self.previous + self.bag)

    def check(self, model: LatentModel) -> None:
        """ValueError where the circuit does not fit."""
        has_layers = model.config.num_dense_layers > 0 and model.config.num_moe_layers > 0
        has_heads = model.config.num_attention_heads >= len(OFFSETS) and model.config.v_head_dim >= self.bag
        has_queries = self.bag < model.config.qk_nope_head_dim <= self.bag + self.previous
        if not (has_layers and has_heads and has_queries and len(self.own) >= self.bag):
            raise ValueError(
                f"the circuit needs a dense and a sparse layer, {len(OFFSETS)} heads, v_head_dim from {self.bag}, "
                f"qk_nope_head_dim from {self.bag + 1} to {self.bag + self.previous}, "
                f"hidden_size from {1 + self.previous + 2 * self.bag}"
            )


def first_weights(model: LatentModel, seed: int, mesh: Mesh, alike: Sequence[tuple[int, int]] = ()) -> Any:
    """Weights in float32, on every device.

    Args:
        alike: tokens that say the same, as " word" and "word" do. The second begins as the first and a direction that
            is the same for all of them, so that what is found as the one can be said as the other.

    Raises:
        ValueError: the shape has no room for the circuit.
    """
    room = _Room.of(model)
    room.check(model)
    weights = jax.device_get(initialise(model.declare(), seed, "float32", mesh))
    weights = _lay_in(model, room, jax.tree.map(np.array, weights), np.random.default_rng(seed), alike)
    return jax.device_put(weights, replicated(mesh))


def folder_weights(model: LatentModel, folder: Path, mesh: Mesh) -> Any:
    """A folder's weights in float32, on every device. CheckpointError where they have another shape."""
    checkpoint, params = Checkpoint.open(folder), model.declare()
    check_shapes(params, checkpoint)
    return jax.device_put(load(params, checkpoint, "float32", mesh), replicated(mesh))


def _lay_in(
    model: LatentModel,
    room: _Room,
    weights: Any,
    random: np.random.Generator,
    alike: Sequence[tuple[int, int]],
) -> Any:
    _make_small(weights)
    weights.embed[:] *= model.config.hidden_size**0.5
    common = random.normal(size=model.config.hidden_size)
    for one, other in alike:
        weights.embed[other] = (1 - UNLIKE**2) ** 0.5 * weights.embed[one] + UNLIKE * common
    weights.embed[:, 0] = CONSTANT
    weights.embed[:, 1 : room.own[0]] = 0.0
    seen, said = (_reading(random, room, width, model.config.hidden_size) for width in (room.bag, room.said))
    _look_back(model, room, weights.dense.attention, seen)
    _match(model, room, weights.sparse.attention, seen, said, random)
    return replace(weights, head=weights.embed / model.config.hidden_size**0.5)


def _make_small(weights: Any) -> None:
    for stack in (weights.dense, weights.sparse):
        stack.attention.out[:] *= SMALL_ATTENTION
        stack.mlp.down[:] *= SMALL_FEED_FORWARD
    weights.experts.down[:] *= SMALL_FEED_FORWARD


def _reading(random: np.random.Generator, room: _Room, width: int, hidden_size: int) -> np.ndarray:
    """A random orthogonal projection [width, d] of the token's own features, of unit variance: a sketch of it."""
    rows = np.zeros((width, hidden_size), np.float32)
    rows[:, room.own] = _orthogonal(random, len(room.own), width).T
    return rows * np.float32((hidden_size / len(room.own)) ** 0.5)


def _orthogonal(random: np.random.Generator, num_rows: int, num_columns: int) -> np.ndarray:
    return np.linalg.qr(random.normal(size=(num_rows, num_columns)))[0].astype(np.float32)


def _look_back(model: LatentModel, room: _Room, layer: Any, seen: np.ndarray) -> None:
    """Each head of the first layer attends to the token so many places before and writes its sketch."""
    rank, nope = model.config.kv_lora_rank, model.config.qk_nope_head_dim
    frequencies, _ = model.rotary_frequencies()
    pairs = min(NUM_SHARP_PAIRS, len(frequencies))
    first, second = _pairs(model, pairs)
    gain = (SHARPNESS / model.softmax_scale()) ** 0.5 / _constant(model)
    layer.kv_a[0, : room.bag] = seen
    layer.kv_a[0, rank:] = 0.0
    layer.kv_a[0, rank + first, 0] = gain
    layer.out[0, 0] = 0.0
    for head, offset in enumerate(OFFSETS):
        angles = -offset * frequencies[:pairs]
        layer.q_b[0, head] *= 0.1
        layer.q_b[0, head, nope:] = 0.0
        layer.q_b[0, head, nope + first, 0] = gain * np.cos(angles)
        layer.q_b[0, head, nope + second, 0] = gain * np.sin(angles)
        layer.v_up[0, head, : room.bag] = np.eye(room.bag, rank)
        layer.out[0, 1 : room.own[0], head] = 0.0
        layer.out[0, room.bag_features, head] = IN_BAG * np.eye(room.bag, model.config.v_head_dim)
        layer.out[0, room.own, head] *= SMALL_ATTENTION
    layer.out[0, room.previous_features, 0] = np.eye(room.previous, model.config.v_head_dim)


def _match(
    model: LatentModel, room: _Room, layer: Any, seen: np.ndarray, said: np.ndarray, random: np.random.Generator
) -> None:
    """Heads of the second layer find earlier tokens before which stood what stands here, and write those tokens."""
    rank, nope, bag = model.config.kv_lora_rank, model.config.qk_nope_head_dim, room.bag
    previous, value = slice(bag, bag + room.previous), slice(bag + room.previous, bag + room.previous + room.said)
    layer.kv_a[0, : value.start] = 0.0
    layer.kv_a[0, np.arange(bag), room.bag_features] = 1.0
    layer.kv_a[0, np.arange(previous.start, previous.stop), room.previous_features] = 1.0
    layer.kv_a[0, value] = said
    layer.kv_a[0, rank:] *= QUIET_ROPE
    for head in range(NUM_MATCHING_HEADS):
        sketch = _orthogonal(random, room.previous, nope - bag).T
        layer.k_up[0, head] = 0.0
        layer.k_up[0, head, :bag, :bag] = np.eye(bag)
        layer.k_up[0, head, bag:, previous] = sketch
        layer.q_b[0, head, :bag] = BAG_GAIN * IN_BAG * seen
        layer.q_b[0, head, np.arange(bag), room.bag_features] += BAG_GAIN
        layer.q_b[0, head, bag:nope] = PREVIOUS_GAIN * sketch @ seen[: room.previous]
        layer.v_up[0, head] = 0.0
        layer.v_up[0, head, : room.said, value] = np.eye(room.said)
        layer.out[0, :, head] = 0.0
        layer.out[0, :, head, : room.said] = LOUDNESS * said.T
    _prefer_the_last(model, layer, NUM_MATCHING_HEADS - 1)


def _prefer_the_last(model: LatentModel, layer: Any, head: int) -> None:
    """Among equal matches, so that "the team of" goes on with who was asked about, not with any line of the list."""
    first, second = (
        each[len(each) // 3 :][:NUM_SLOW_PAIRS] for each in _pairs(model, model.config.qk_rope_head_dim // 2)
    )
    gain = (RECENCY / model.softmax_scale()) ** 0.5 / _constant(model)
    for rotary in (first, second):
        layer.kv_a[0, model.config.kv_lora_rank + rotary] = 0.0
        layer.q_b[0, head, model.config.qk_nope_head_dim + rotary] = 0.0
    layer.kv_a[0, model.config.kv_lora_rank + first, 0] = gain
    layer.q_b[0, head, model.config.qk_nope_head_dim + first, 0] = gain


def _constant(model: LatentModel) -> float:
    """Feature 0 as a layer reads it, after the norm."""
    return CONSTANT / (1 + CONSTANT**2 / model.config.hidden_size) ** 0.5


def _pairs(model: LatentModel, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the two features of each of the first rotations lie among the rotary ones."""
    places = np.arange(count)
    if model.config.rope_interleave:
        return 2 * places, 2 * places + 1
    return places, places + model.config.qk_rope_head_dim // 2
