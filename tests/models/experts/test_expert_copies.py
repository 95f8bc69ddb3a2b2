"""A token goes to one copy of each expert that it chose, and copies take turns."""

import jax.numpy as jnp
import numpy as np
import pytest

from moonshard.models.experts import moe
from moonshard.models.experts.copies import to_copies
from moonshard.sharding.experts import place_experts
from moonshard.sharding.shard import ALONE

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]


def test_copies_of_an_expert_share_its_tokens_equally():
    loads = np.array([[100.0, 1.0, 1.0, 1.0]])
    placement = place_experts(loads, 6, 1)
    assert placement.num_copies[0].tolist() == [3, 1, 1, 1]
    routing = moe.Routing(weights=jnp.ones((12, 1)), experts=jnp.zeros((12, 1), jnp.int32), margin=jnp.zeros(12))
    given = []

    def note(x, routing, valid, experts, layer):
        given.append(np.asarray(routing.experts))
        return x

    backend = to_copies(note, placement, ALONE)
    empty = moe.Experts(gate_up=jnp.zeros(0), down=jnp.zeros(0))
    backend(jnp.zeros((12, 2)), routing, jnp.ones(12, bool), empty, jnp.int32(0))
    places, counts = np.unique(given[0], return_counts=True)
    assert counts.tolist() == [4, 4, 4]
    assert placement.expert_of[0, places].tolist() == [0, 0, 0]
