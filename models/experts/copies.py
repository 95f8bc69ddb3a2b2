"""Routed experts that several devices hold: which copy of an expert a token goes to.

The router chooses experts; weights and the exchange between devices count places, and an expert with several copies has
several places. Which experts get copies, and on which devices, is decided in `sharding.experts`.
"""

import jax.numpy as jnp

from moonshard.models.experts.moe import Backend, Experts, Routing
from moonshard.sharding.arrays import Array, Bool, Float, Int
from moonshard.sharding.experts import ExpertPlacement
from moonshard.sharding.shard import Shard


def to_copies(backend: Backend, placement: ExpertPlacement, shard: Shard) -> Backend:
    """A backend over experts, from one over places. `placement` has the layers of the weights that it will be given.

    An expert's copies take turns from token to token, and from partition to partition, so that the first rows of all
    partitions do not go to the same one.
    """
    places_of, num_copies = jnp.asarray(placement.places_of), jnp.asarray(placement.num_copies)

    def run(
        x: Float[Array, "t d"],
        routing: Routing,
        valid: Bool[Array, "t"],
        experts: Experts[Array],
        layer: Int[Array, ""],
    ) -> Float[Array, "t d"]:
        turn = jnp.arange(len(x))[:, None] + shard.partition()
        copy = turn % num_copies[layer][routing.experts]
        places = places_of[layer][routing.experts, copy]
        at_places = Routing(weights=routing.weights, experts=places, margin=routing.margin)
        return backend(x, at_places, valid, experts, layer)

    return run
