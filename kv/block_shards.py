"""How whole blocks of KV, as the host has them, are cut for the devices of a mesh, and put together again.

Every device of a partition has its pages: whole blocks, or, with context parallelism, some of each block's tokens. On
the way from or to the host each device carries a different part: those tokens, or else some of the layers, so that
nothing crosses a bus twice. Devices that need whole blocks gather the other parts from one another.

Where several processes have the mesh together, each has on its host the parts that its own devices carry.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moonshard.sharding.mesh import BY_PARTITION
from moonshard.sharding.shard import Shard

LAYERS, TOKENS = 1, 2  # dimensions of blocks [b, layers, block_size, features]


class BlockShards:
    """How one mesh holds blocks: `pages` is the cut of its pages, `payload` that of blocks on their way.

    Blocks on their way are [partitions * b, layers, block_size, features]; where devices carry layers, these are padded
    to a multiple of `tensor`.
    """

    def __init__(self, mesh: Mesh, shard: Shard, *, num_layers: int, block_size: int):
        self._mesh = mesh
        self._num_partitions, self._num_parts = shard.mesh.num_partitions, shard.mesh.tensor
        self._is_token_cut = bool(shard.axes("kv_tokens"))
        self._axis = TOKENS if self._is_token_cut else LAYERS
        self.num_layers, self._block_size = num_layers, block_size
        self._layers_per_part = -(-num_layers // self._num_parts)
        by_layer, by_token = PartitionSpec(*BY_PARTITION, "tensor"), PartitionSpec(*BY_PARTITION, None, "tensor")
        self.pages = by_token if self._is_token_cut else BY_PARTITION
        self.payload = by_token if self._is_token_cut else by_layer
        self._zeros: dict[tuple[Any, tuple[int, ...]], jax.Array] = {}

    # ---- inside a program, on each device

    def own_part(self, blocks: jax.Array) -> jax.Array:
        """The part that this device carries of blocks [b, layers, own tokens, features] read from its pages."""
        if self._is_token_cut or self._num_parts == 1:
            return blocks
        missing = self._layers_per_part * self._num_parts - self.num_layers
        blocks = jnp.pad(blocks, ((0, 0), (0, missing), (0, 0), (0, 0)))
        first = jax.lax.axis_index("tensor") * self._layers_per_part
        return jax.lax.dynamic_slice_in_dim(blocks, first, self._layers_per_part, axis=LAYERS)

    def whole(self, part: jax.Array) -> jax.Array:
        """Blocks as this device's pages have them, from the parts that the devices carried: undoes `own_part`."""
        if self._is_token_cut or self._num_parts == 1:
            return part
        return jax.lax.all_gather(part, "tensor", axis=LAYERS, tiled=True)[:, : self.num_layers]

    # ---- on the host

    def own_parts(self, partition: int) -> range:
        """Which parts of the partition's blocks the devices of this process carry, of those numbered along `tensor`."""
        row = self._mesh.devices.reshape(self._num_partitions, self._num_parts)[partition]
        own = [part for part, device in enumerate(row) if device.process_index == jax.process_index()]
        return range(own[0], own[-1] + 1) if own else range(0)

    def collect(self, payload: jax.Array, partition: int) -> np.ndarray:
        """One partition's blocks [b, layers, block_size, features], as far as they are on this process's devices.

        Waits for them. Of a partition that has none of its devices here there are no layers.
        """
        num_blocks = payload.shape[0] // self._num_partitions
        own = [s for s in payload.addressable_shards if (s.index[0].start or 0) == partition * num_blocks]
        if not own:
            return np.empty((num_blocks, 0, *payload.shape[2:]), payload.dtype)
        own.sort(key=lambda shard: shard.index[self._axis].start or 0)
        parts = [np.asarray(shard.data) for shard in own]
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=self._axis)
        return joined[:, : max(0, self.num_layers - (own[0].index[LAYERS].start or 0))]

    def spread(self, blocks: np.ndarray | jax.Array, partition: int) -> np.ndarray | jax.Array:
        """Blocks of one partition, as `collect` gives them, on its devices, as a land takes them.

        They come from the host; to a mesh of one device also from that device, and then never leave it.
        """
        if self._mesh.size == 1:
            return blocks
        num_blocks, num_layers, _, num_features = blocks.shape
        own = self.own_parts(partition)
        if own and not self._is_token_cut and (missing := self._layers_per_part * len(own) - num_layers):
            blocks = np.pad(blocks, ((0, 0), (0, missing), (0, 0), (0, 0)))
        abstract = self.abstract_payload((num_blocks, self.num_layers, self._block_size, num_features), blocks.dtype)
        shape, sharding = abstract.shape, abstract.sharding
        assert isinstance(sharding, NamedSharding)
        part_shape = sharding.shard_shape(shape)
        behind = own.start * part_shape[self._axis]  # where the own parts begin
        parts = []
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            assert index is not None  # of a device of this process
            if (index[0].start or 0) == partition * num_blocks:
                start = (index[self._axis].start or 0) - behind
                part = blocks[(slice(None),) * self._axis + (slice(start, start + part_shape[self._axis]),)]
                parts.append(jax.device_put(np.ascontiguousarray(part), device))
            else:
                parts.append(self._nothing(device, part_shape, blocks.dtype))
        return jax.make_array_from_single_device_arrays(shape, sharding, parts)

    def abstract_payload(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """What `spread` makes of whole blocks of this shape."""
        num_blocks, num_layers, *token = shape
        if not self._is_token_cut:
            num_layers = self._layers_per_part * self._num_parts
        sharding = NamedSharding(self._mesh, self.payload)
        return jax.ShapeDtypeStruct((self._num_partitions * num_blocks, num_layers, *token), dtype, sharding=sharding)

    def _nothing(self, device: Any, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        """A placeholder for devices of other partitions, which write it nowhere. Cached: made once."""
        if (device, shape) not in self._zeros:
            self._zeros[device, shape] = jax.device_put(np.zeros(shape, dtype), device)
        return self._zeros[device, shape]
