"""Muon for matrices, AdamW for the rest, and how fast both go at each step.

Muon makes the update of every matrix orthogonal, so it must be told which axes of a stacked leaf are one matrix's rows
and columns: heads and their features together are one side, as in the checkpoint; layers, experts, gate and up are
matrices of their own. Sources: Muon is Scalable for LLM Training (arXiv 2502.16982), section 2.2, for the scale that
lets both share a learning rate; optax.contrib.muon for the iteration.
"""

from collections.abc import Callable, Container
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from moonshard.experiments.training.run.recipe import DECAY_SHARE, Recipe, Restart
from moonshard.models.model import Model
from moonshard.models.spec import Param
from moonshard.models.weights import is_param

Schedule = Callable[[Any], jax.Array]  # by step, counted from 0
CONSISTENT_RMS = 0.2  # of an update, as AdamW's typically is
ADAM_B1, ADAM_B2 = 0.9, 0.95
GATE, GATE_SLOWNESS = "gate", 0.2
PLAIN = MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)  # [... out in]
HEADS_OUT = MuonDimensionNumbers(reduction_axis=-1, output_axis=(-3, -2))  # [... h k in]
HEADS_IN = MuonDimensionNumbers(reduction_axis=(-2, -1), output_axis=-3)  # [... out h v]
MATRICES = {
    "q_a": PLAIN,
    "q_b": HEADS_OUT,
    "kv_a": PLAIN,
    "k_up": HEADS_OUT,
    "v_up": HEADS_OUT,
    "out": HEADS_IN,
    "gate_up": PLAIN,
    "down": PLAIN,
}


def matrices(params: Any) -> Any:
    """Which axes of each leaf make a matrix; None where AdamW updates it: norms, tables and gates."""

    def dimensions(path: tuple[Any, ...], _: Param) -> MuonDimensionNumbers | None:
        return MATRICES.get(path[-1].name)

    return jax.tree_util.tree_map_with_path(dimensions, params, is_leaf=is_param)


def build_optimiser(recipe: Recipe, model: Model) -> optax.GradientTransformation:
    """Clips, then updates; only matrices decay.

    Its update of the router's bias is discarded; `step._balance` moves the bias. Gates go slowest: faster ones outrun
    the bias that balances them. Checkpoints know the state by its place in this chain.
    """
    params = model.declare()
    update = _muon(recipe, params) if recipe.optimiser == "muon" else _adamw(recipe, params)
    slow_gates = optax.masked(optax.scale(GATE_SLOWNESS), _named(params, {GATE}))
    return optax.chain(optax.clip_by_global_norm(recipe.max_gradient_norm), update, slow_gates)


def _muon(recipe: Recipe, params: Any) -> optax.GradientTransformation:
    """Muon for matrices, AdamW for the rest."""
    dimensions: Any = matrices(params)
    return muon(
        learning_rate(recipe),
        weight_decay=recipe.weight_decay,
        adam_b1=ADAM_B1,
        adam_b2=ADAM_B2,
        adam_learning_rate=_scheduled(recipe, recipe.other_learning_rate),
        muon_weight_dimension_numbers=dimensions,
        consistent_rms=CONSISTENT_RMS,
    )


def _adamw(recipe: Recipe, params: Any) -> optax.GradientTransformation:
    """AdamW for everything."""
    is_matrix = _named(params, MATRICES)
    return optax.adamw(learning_rate(recipe), b1=ADAM_B1, b2=ADAM_B2, weight_decay=recipe.weight_decay, mask=is_matrix)


def _named(params: Any, names: Container[str]) -> Any:
    """A tree that is True for each leaf with one of these names."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].name in names, params, is_leaf=is_param)


def learning_rate(recipe: Recipe) -> Schedule:
    """Warm-up, constant, then linearly to 0; the same again, lower, at each restart."""
    return _scheduled(recipe, recipe.learning_rate)


def _scheduled(recipe: Recipe, rate: float) -> Schedule:
    warmup = max(1, recipe.num_warmup_steps)

    def of_cycle(cycle: _Cycle, step: Any) -> jax.Array:
        return rate * cycle.rate * jnp.minimum(1.0, (step - cycle.start + 1) / warmup) * cycle.remaining(step)

    return _by_cycle(recipe, of_cycle)


def balance_speed(recipe: Recipe) -> Schedule:
    """How far a step moves the router's bias: constant, then as far down as the cycle's `least_balance`."""

    def of_cycle(cycle: _Cycle, step: Any) -> jax.Array:
        return recipe.balance_speed * jnp.maximum(cycle.remaining(step), cycle.least_balance)

    return _by_cycle(recipe, of_cycle)


class _Cycle(NamedTuple):
    """Steps from one beginning of the schedule to the next."""

    start: int
    stop: int
    rate: float
    least_balance: float

    def remaining(self, step: Any) -> jax.Array:
        """1, falling linearly to 0 over the last steps."""
        return jnp.clip((self.stop - step) / max(1.0, DECAY_SHARE * (self.stop - self.start)), 0.0, 1.0)


def _by_cycle(recipe: Recipe, of_cycle: Callable[[_Cycle, Any], jax.Array]) -> Schedule:
    begun = [Restart(step=0, rate=1.0, least_balance=0.0), *recipe.restarts]
    stops = [*(restart.step for restart in recipe.restarts), recipe.num_steps]
    cycles = [_Cycle(one.step, stop, one.rate, one.least_balance) for one, stop in zip(begun, stops, strict=True)]

    def value(step: Any) -> jax.Array:
        found = of_cycle(cycles[0], step)
        for cycle in cycles[1:]:
            found = jnp.where(step >= cycle.start, of_cycle(cycle, step), found)
        return found

    return value
