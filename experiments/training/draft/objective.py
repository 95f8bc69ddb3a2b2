"""What the draft learns from: the target's own next tokens, guessed over several rows of its own.

Training-time test, EAGLE-3 (arXiv 2503.01840), section 3.2: after the rows that read the target come rows that read the
draft's hidden states of the rows before them, as they will when it serves, and the cross-entropies of all are added. A
further row sees the first rows up to where it began to guess and its own guesses behind them. Conversations are the
corpus'; of what the assistant says only those tokens count that the target would say there, so that all of it is the
target's own output. Labels are the target's whole distributions. Indices as in `models.draft`: row t reads the feature
of t and the token at t + 1, and says the token at t + 2.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from moonshard.experiments.training.run.recipe import ANSWER_WEIGHT
from moonshard.experiments.training.run.step import Lesson
from moonshard.models import training
from moonshard.models.draft import features_of, lend
from moonshard.models.eagle import forward
from moonshard.models.eagle.config import LlamaShape
from moonshard.models.eagle.draft import Eagle
from moonshard.models.eagle.weights import EagleWeights
from moonshard.models.model import Batch, Model
from moonshard.sharding.arrays import Array, Float, Int
from moonshard.sharding.shard import ALONE

NUM_GUESSES = 3
NUM_COUNTED = 160


@dataclass(frozen=True, slots=True)
class Objective:
    target: Model
    draft: Eagle

    def taught(
        self, weights: Any, tokens: Int[Array, "n t"], positions: Int[Array, "n t"]
    ) -> tuple[Float[Array, "n t d"], Float[Array, "n t f"]]:
        """The target's last hidden states and features, of rows that each hold a whole sequence.

        Positions below 0 are padding, at a row's end.
        """
        tables = jnp.zeros((len(tokens), 1, 0), jnp.int32)
        hidden, _, seen = self.target.forward(
            weights,
            training.no_pages(),
            Batch(tokens=tokens, positions=positions, block_tables=tables),
            backend=training.all_blocks,
            attend=functools.partial(training.attend_causal, rows_at_once=1),
            taps=self.draft.taps,
        )
        return hidden, features_of(self.draft, hidden, seen)

    def loss(
        self, own: EagleWeights[Array], target: Any, lesson: Lesson
    ) -> tuple[Float[Array, ""], Float[Array, "guesses"]]:
        """The weighted mean over what the assistant says, added over the guesses; and of each the share that is right.

        A row of tokens counts with its first `NUM_COUNTED` of those: logits are half the work.
        """
        is_real = jnp.flip(jnp.cumsum(jnp.flip(lesson.weights, axis=1), axis=1), axis=1) > 0
        positions = jnp.where(is_real, lesson.positions, -1)
        hidden, features = jax.lax.stop_gradient(self.taught(target, lesson.tokens[:, :-1], positions))
        is_spoken = lesson.weights[:, 1:] >= ANSWER_WEIGHT
        is_counted, at = jax.lax.top_k(is_spoken.astype(jnp.int32), min(NUM_COUNTED, is_spoken.shape[1]))
        said = jax.lax.stop_gradient(self._logits(target, _taken(hidden[:, 1:], at)))
        labels, best = jax.nn.softmax(said), said.argmax(axis=-1)
        is_own = best == jnp.take_along_axis(lesson.tokens[:, 2:], at, axis=1)
        weights = jnp.take_along_axis(lesson.weights[:, 1:], at, axis=1) * is_counted * is_own
        whole = lend(own, target)
        asked = (lesson.tokens[:, 1:-1], lesson.positions[:, :-1], features[:, :-1])
        losses, shares = [], []
        for index, state in enumerate(self.guesses(whole, *asked)):
            logits = self._guessed(whole, _taken(state, at))
            counted = weights * (at >= index)
            total = jnp.maximum(counted.sum(), 1.0)
            losses.append((-(labels * jax.nn.log_softmax(logits)).sum(axis=-1) * counted).sum() / total)
            shares.append(((logits.argmax(axis=-1) == best) * counted).sum() / total)
        return sum(losses, jnp.float32(0)), jnp.stack(shares)

    def first_guesses(
        self, whole: EagleWeights[Array], target: Any, tokens: Int[Array, "n t"], positions: Int[Array, "n t"]
    ) -> tuple[Float[Array, "n s v"], Float[Array, "n s v"]]:
        """Of rows 0 to t - 3: logits of the target and of the draft for the token two behind the row.

        `whole`: the draft's weights with the tables that it borrows.
        """
        hidden, features = self.taught(target, tokens, positions)
        first, *_ = self.guesses(whole, tokens[:, 1:-1], positions[:, :-2], features[:, :-2])
        return self._logits(target, hidden[:, 1:-1]), self._guessed(whole, first)

    def guesses(
        self,
        w: EagleWeights[Array],
        tokens: Int[Array, "n t"],
        positions: Int[Array, "n t"],
        features: Float[Array, "n t f"],
    ) -> list[Float[Array, "n t d"]]:
        """Hidden states of the first rows, of rows behind one of them, behind two, and so on."""
        config = self.draft.config
        assert isinstance(config.attention, LlamaShape)
        hidden = forward.fused(config, w, features)
        cached: list[tuple[Array, Array]] = []
        found: list[Array] = []
        for _ in range(NUM_GUESSES):
            attended = functools.partial(_attended, config.attention, w.attention, positions, cached)
            hidden = forward.layer(config, w, tokens, hidden, attended, ALONE)
            found.append(hidden)
            hidden = _shifted(hidden, 1)
        return found

    def _logits(self, weights: Any, hidden: Float[Array, "n t d"]) -> Float[Array, "n t v"]:
        """The target's."""
        logits = self.target.unembed(weights, hidden.reshape(-1, hidden.shape[-1]))
        return logits.reshape(*hidden.shape[:2], -1)

    def _guessed(self, weights: EagleWeights[Array], hidden: Float[Array, "n t d"]) -> Float[Array, "n t v"]:
        """The draft's."""
        logits = self.draft.logits(weights, hidden.reshape(-1, hidden.shape[-1]))
        return logits.reshape(*hidden.shape[:2], -1)


def _taken(x: Float[Array, "n t d"], at: Int[Array, "n s"]) -> Float[Array, "n s d"]:
    return jnp.take_along_axis(x, at[..., None], axis=1)


def _attended(
    shape: LlamaShape, w: Any, positions: Int[Array, "n t"], cached: list[tuple[Array, Array]], both: Array
) -> Float[Array, "n t d"]:
    """Of guess number j: the first rows up to j before a row, and one row of each guess behind them."""
    queries, keys, values = forward.project(shape, w, both, positions)
    cached.append((keys, values))
    n, t, h, k = queries.shape
    groups = queries.reshape(n, t, shape.num_kv_heads, -1, k) * k**-0.5
    ahead = len(cached) - 1
    visible = jnp.arange(t)[None, :] <= jnp.arange(t)[:, None] - ahead
    scores = jnp.einsum("ntgrk,nsgk->ngrts", groups, cached[0][0])
    parts = [jnp.where(visible, scores, -1e30)]
    later = [[_shifted(each, ahead - index) for each in cached[index]] for index in range(1, ahead + 1)]
    parts += [jnp.einsum("ntgrk,ntgk->ngrt", groups, keys)[..., None] for keys, _ in later]
    weights = jax.nn.softmax(jnp.concatenate(parts, axis=-1), axis=-1)
    mixed = jnp.einsum("ngrts,nsgk->ntgrk", weights[..., :t], cached[0][1])
    for index, (_, values) in enumerate(later):
        mixed += jnp.einsum("ngrt,ntgk->ntgrk", weights[..., t + index], values)
    return forward.joined(w, mixed.reshape(n, t, h, k))


def _shifted(x: Float[Array, "n t *x"], count: int) -> Float[Array, "n t *x"]:
    """Each row that of `count` rows before it; the first ones 0."""
    return jnp.pad(x, ((0, 0), (count, 0), *((0, 0),) * (x.ndim - 2)))[:, : x.shape[1]]
