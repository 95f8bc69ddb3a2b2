"""One step of training: the loss, its gradient over all devices, the update, the router's balance.

Data-parallel: every device holds all weights and takes its share of the rows; gradients and loads are summed over all,
so that the update is the one a single device would make. The forward pass is the one that serves.
Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2: the router's bias follows the load and has no gradient.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moonshard.experiments.training.run.beginning import first_weights, folder_weights
from moonshard.experiments.training.run.optimiser import balance_speed, build_optimiser, learning_rate
from moonshard.experiments.training.run.recipe import ANSWER_WEIGHT, Recipe, Rows
from moonshard.experiments.training.texts.corpus import POCKET
from moonshard.models import training
from moonshard.models.model import Batch, LatentModel, Observations
from moonshard.models.pytree import pytree
from moonshard.models.weights import is_param
from moonshard.sharding.arrays import Array, Float, Int
from moonshard.sharding.mesh import replicated

Weights = Any
PER_DEVICE = PartitionSpec("data")
EVERYWHERE = PartitionSpec()


@pytree
class Lesson:
    """`Rows`, on the devices."""

    tokens: Int[Array, "n t1"]
    weights: Float[Array, "n t"]
    positions: Int[Array, "n t"]


@pytree
class TrainState:
    """All that a checkpoint holds. The router's bias is among the weights."""

    weights: Weights
    optimiser: Any
    step: Int[Array, ""]  # steps done


@pytree
class Sums:
    """What one step saw, summed over all its rows."""

    loss: Float[Array, ""]  # weighted
    weight: Float[Array, ""]
    answer_loss: Float[Array, ""]  # of answers' tokens alone
    num_answer_tokens: Float[Array, ""]
    loads: Float[Array, "l e"]  # tokens that each expert of each layer got


@pytree
class StepSums:
    sums: Sums
    gradient_norm: Float[Array, ""]
    learning_rate: Float[Array, ""]


def first_state(recipe: Recipe, model: LatentModel, mesh: Mesh, alike: Sequence[tuple[int, int]] = ()) -> TrainState:
    """The first weights, as the recipe says, and nothing moved yet.

    CheckpointError or ModelError where it begins with a folder's weights and that cannot be read.
    """
    if recipe.begins == "embedded":
        weights = folder_weights(model, POCKET, mesh)
    else:
        weights = first_weights(model, recipe.seed, mesh, alike)
    optimiser = jax.jit(build_optimiser(recipe, model).init, out_shardings=replicated(mesh))(weights)
    return TrainState(weights=weights, optimiser=optimiser, step=jax.device_put(jnp.int32(0), replicated(mesh)))


def place(rows: Rows, mesh: Mesh) -> Lesson:
    """The rows, equally many on each device; rows of padding, which teach nothing, fill up the rest."""
    share = NamedSharding(mesh, PER_DEVICE)
    num_missing = -len(rows.tokens) % mesh.shape["data"]
    tokens, weights, positions = (
        jax.device_put(np.pad(part, ((0, num_missing), (0, 0))), share)
        for part in (rows.tokens, rows.weights, rows.positions)
    )
    return Lesson(tokens=tokens, weights=weights, positions=positions)


def build_step(
    recipe: Recipe, model: LatentModel, mesh: Mesh
) -> Callable[[TrainState, Lesson], tuple[TrainState, StepSums]]:
    """One step as a jitted program, to which the state is donated."""
    optimiser, rate, speed = build_optimiser(recipe, model), learning_rate(recipe), balance_speed(recipe)
    differentiate = jax.value_and_grad(functools.partial(_loss, recipe, model), has_aux=True)

    def on_each_device(weights: Weights, lesson: Lesson) -> tuple[Sums, Weights]:
        (_, sums), gradient = differentiate(weights, lesson)
        return jax.lax.psum((sums, gradient), "data")

    gradient_of = jax.shard_map(
        on_each_device, mesh=mesh, in_specs=(EVERYWHERE, PER_DEVICE), out_specs=EVERYWHERE, check_vma=False
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, lesson: Lesson) -> tuple[TrainState, StepSums]:
        sums, gradient = gradient_of(state.weights, lesson)
        gradient = jax.tree.map(lambda leaf: leaf / jnp.maximum(sums.weight, 1.0), gradient)
        before: Any = state.weights  # to optax, any tree of arrays
        updates, inner = optimiser.update(gradient, state.optimiser, before)
        weights: Any = optax.apply_updates(before, updates)
        weights = _balance(state.weights, weights, sums.loads, speed(state.step))
        report = StepSums(sums=sums, gradient_norm=optax.tree.norm(gradient), learning_rate=rate(state.step))
        return TrainState(weights=weights, optimiser=inner, step=state.step + 1), report

    return step


def build_predict(recipe: Recipe, model: LatentModel, mesh: Mesh) -> Callable[[Weights, Rows], np.ndarray]:
    """A program for the likeliest next token everywhere, given the true ones before it: [n, t] int32, on the host."""

    def on_each_device(weights: Weights, lesson: Lesson) -> Int[Array, "n t"]:
        logits, _ = _logits(recipe, model, weights, lesson)
        return logits.argmax(axis=-1).reshape(lesson.positions.shape)

    program = jax.jit(
        jax.shard_map(
            on_each_device, mesh=mesh, in_specs=(EVERYWHERE, PER_DEVICE), out_specs=PER_DEVICE, check_vma=False
        )
    )

    def predict(weights: Weights, rows: Rows) -> np.ndarray:
        return np.asarray(program(weights, place(rows, mesh)))[: len(rows.tokens)]

    return predict


def _loss(recipe: Recipe, model: LatentModel, weights: Weights, lesson: Lesson) -> tuple[Array, Sums]:
    logits, loads = _logits(recipe, model, weights, lesson)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, lesson.tokens[:, 1:].reshape(-1))
    token_weights = lesson.weights.reshape(-1)
    is_answer = (token_weights >= ANSWER_WEIGHT).astype(jnp.float32)
    sums = Sums(
        loss=(losses * token_weights).sum(),
        weight=token_weights.sum(),
        answer_loss=(losses * is_answer).sum(),
        num_answer_tokens=is_answer.sum(),
        loads=loads,
    )
    return sums.loss, sums


def _logits(
    recipe: Recipe, model: LatentModel, weights: Weights, lesson: Lesson
) -> tuple[Float[Array, "tokens v"], Float[Array, "l e"]]:
    """Logits of all tokens in float32, and how many real tokens went to each expert."""
    weights = jax.tree.map(
        lambda param, leaf: leaf.astype(param.dtype or recipe.dtype), model.declare(), weights, is_leaf=is_param
    )
    is_real = jnp.flip(jnp.cumsum(jnp.flip(lesson.weights, axis=1), axis=1), axis=1) > 0  # padding is at the end
    batch = Batch(
        tokens=lesson.tokens[:, :-1],
        positions=jnp.where(is_real, lesson.positions, -1),
        block_tables=jnp.zeros((len(lesson.tokens), 1, 0), jnp.int32),
    )
    hidden, _, seen = model.forward(
        weights,
        training.no_pages(),
        batch,
        backend=training.all_blocks,
        attend=functools.partial(training.attend_causal, rows_at_once=recipe.rows_at_once),
        observe=True,
        unrolled=True,
    )
    return model.unembed(weights, hidden.reshape(-1, hidden.shape[-1])), _loads(model, seen, is_real)


def _loads(model: LatentModel, seen: Observations | None, is_real: Array) -> Float[Array, "l e"]:
    if seen is None or seen.experts is None:
        return jnp.zeros((0, model.config.n_routed_experts))
    chosen = jax.nn.one_hot(seen.experts, model.config.n_routed_experts).sum(axis=2)  # [l tokens e]
    return (chosen * is_real.reshape(-1)[:, None]).sum(axis=1)


def _balance(before: Weights, after: Weights, loads: Float[Array, "l e"], speed: Array) -> Weights:
    """The update, with the bias of underused experts raised and that of overused ones lowered."""
    if before.sparse is None or before.sparse.router is None or after.sparse is None or after.sparse.router is None:
        return after
    bias = before.sparse.router.bias + speed * jnp.sign(loads.mean(axis=1, keepdims=True) - loads)
    router = replace(after.sparse.router, bias=bias)
    return replace(after, sparse=replace(after.sparse, router=router))
