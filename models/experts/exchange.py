"""Expert parallelism: every token goes to the devices that hold its experts, and what they make of it comes back.

A backend of `models.experts.moe` runs the experts of one device; here it is given the tokens of all devices that need
them. A token travels once to each device that holds some of its experts, in an all-to-all over the mesh axis `expert`.
Buffers have the capacity for somewhat more than a fair share; what does not fit goes in another round, so that no
token is dropped even where all choose one expert, and no memory is set aside for that. The devices along `tensor` have
the same tokens: each takes those for its own experts, and the sum over `tensor` that follows every layer adds them up.
Source: GShard (arXiv 2006.16668), section 3.2, for the all-to-all; here without its dropping.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moonshard.models.experts.moe import Backend, Experts, Routing
from moonshard.sharding.arrays import Array, Bool, Float, Int
from moonshard.sharding.shard import Shard

CAPACITY_FACTOR = 1.5  # of a buffer, in fair shares
MIN_CAPACITY = 8  # tokens


class _Parcel(NamedTuple):
    """Tokens on their way: as many as the capacity `c` to each of the devices along `expert`."""

    x: Float[Array, "devices c d"]
    experts: Int[Array, "devices c k"]  # as the receiver counts them; its number of experts: none of its own
    weights: Float[Array, "devices c k"]


def exchanged(backend: Backend, shard: Shard) -> Backend:
    """A backend over the experts of all devices, made from one over a device's own (on one device: that one)."""
    if shard.num_parts("experts") == 1:
        return backend

    def run(
        x: Float[Array, "t d"],
        routing: Routing,
        valid: Bool[Array, "t"],
        experts: Experts[Array],
        layer: Int[Array, ""],
    ) -> Float[Array, "t d"]:
        num_own = experts.down.shape[1]
        owner, local = _owners(shard, routing.experts, num_own)
        owner = jnp.where(valid[:, None], owner, -1)
        if "expert" not in shard.axes("experts"):
            own = Routing(weights=routing.weights, experts=jnp.where(owner < 0, num_own, local), margin=routing.margin)
            return backend(x, own, valid, experts, layer)
        return _rounds(backend, shard, x, routing, owner, local, experts, layer)

    return run


def _owners(shard: Shard, chosen: Int[Array, "t k"], num_own: int) -> tuple[Int[Array, "t k"], Int[Array, "t k"]]:
    """For each choice, the device along `expert` that holds the expert, and the expert's number there.

    The owner is -1 where another device along `tensor` sends the token. Devices are counted as the rules name the axes,
    major first.
    """
    device, local = chosen // num_own, chosen % num_own
    owner, is_sent = jnp.zeros_like(device), jnp.ones_like(device, bool)
    for axis in reversed(shard.axes("experts")):
        size = getattr(shard.mesh, axis)
        device, coordinate = device // size, device % size
        if axis == "expert":
            owner = coordinate
        else:
            is_sent &= coordinate == jax.lax.axis_index(axis)
    return jnp.where(is_sent, owner, -1), local


def _rounds(
    backend: Backend,
    shard: Shard,
    x: Float[Array, "t d"],
    routing: Routing,
    owner: Int[Array, "t k"],
    local: Int[Array, "t k"],
    experts: Experts[Array],
    layer: Int[Array, ""],
) -> Float[Array, "t d"]:
    num_tokens, num_devices, num_own = len(x), shard.mesh.expert, experts.down.shape[1]
    capacity = capacity_for(num_tokens, routing.experts.shape[1], num_devices)
    goes = (owner[:, :, None] == jnp.arange(num_devices)).any(axis=1)  # [t devices]
    rank = jnp.cumsum(goes, axis=0) - 1
    num_rounds = jax.lax.pmax(-(-goes.sum(axis=0).max() // capacity), "expert")

    def exchange(index: Int[Array, ""], out: Float[Array, "t d"]) -> Float[Array, "t d"]:
        offset = rank - index * capacity
        is_now = goes & (offset >= 0) & (offset < capacity)
        size = num_devices * capacity
        row_of = jnp.where(is_now, jnp.arange(num_devices) * capacity + offset, size)
        token_of = jnp.full(size, num_tokens).at[row_of].set(jnp.arange(num_tokens)[:, None], mode="drop")
        parcel = _pack(x, routing.weights, owner, local, token_of.reshape(num_devices, capacity), num_own)
        answers = _visit(backend, jax.tree.map(_swap, parcel), experts, layer)
        return out.at[token_of].add(_swap(answers).reshape(-1, x.shape[1]), mode="drop")

    return jax.lax.fori_loop(0, num_rounds, exchange, jnp.zeros_like(x))


def _pack(
    x: Float[Array, "t d"],
    weights: Float[Array, "t k"],
    owner: Int[Array, "t k"],
    local: Int[Array, "t k"],
    token_of: Int[Array, "devices c"],
    num_own: int,
) -> _Parcel:
    def take(values: Array, fill: int) -> Array:
        return values.at[token_of].get(mode="fill", fill_value=fill)

    is_for = take(owner, -1) == jnp.arange(len(token_of))[:, None, None]
    return _Parcel(x=take(x, 0), experts=jnp.where(is_for, take(local, 0), num_own), weights=take(weights, 0))


def _visit(
    backend: Backend, parcel: _Parcel, experts: Experts[Array], layer: Int[Array, ""]
) -> Float[Array, "devices c d"]:
    """Runs this device's experts on the tokens that arrived."""
    flat = jax.tree.map(lambda part: part.reshape(-1, part.shape[-1]), parcel)
    valid = (flat.experts < experts.down.shape[1]).any(axis=1)
    routing = Routing(weights=flat.weights, experts=flat.experts, margin=jnp.zeros(len(valid)))
    return backend(flat.x, routing, valid, experts, layer).reshape(parcel.x.shape)


def _swap(parts: Array) -> Array:
    """An all-to-all: part i goes to device i, and part j of the result came from device j."""
    return jax.lax.all_to_all(parts, "expert", split_axis=0, concat_axis=0, tiled=True)


def capacity_for(num_tokens: int, top_k: int, num_devices: int) -> int:
    """How many tokens one device may send to another in a round."""
    fair = num_tokens * min(1.0, top_k / num_devices)
    return min(num_tokens, max(MIN_CAPACITY, int(CAPACITY_FACTOR * fair) + 1))
