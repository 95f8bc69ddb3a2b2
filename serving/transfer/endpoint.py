"""Where a decode worker's landing slab is and how KV lies in it, as it is announced, and what a writer makes of it.

The writer intersects the announced layout with its own (`sharding.reshard`) and turns cells into addresses; whether the
two fit is found here, before a byte moves. Bytes are moved by `plane`; which cells may be written is decided in
`control.handoff`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moonshard.kv import transfer
from moonshard.kv.slab_shards import Region
from moonshard.rpc import link_pb2
from moonshard.rpc.status import FailedPrecondition, InvalidArgument
from moonshard.sharding import reshard
from moonshard.sharding.layout import (
    BlockShape,
    GroupLayout,
    Layout,
    LayoutMismatch,
    ShardLayout,
    Span,
    Tile,
    check_alike,
)

MAX_SHARDS = 1024  # of a partition: what a plan takes grows with their square
_SESSION = re.compile(r"[\x21-\x7e]{1,512}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """A slab that KV is written from or into. Cell c of partition p is the `p * num_cells + c`-th of the slab."""

    transport: str
    session: str
    num_cells: int  # per partition
    regions: Mapping[int, Region]  # by owner
    layout: Layout
    fingerprint: str

    def cells(self, partition: int, cells: Sequence[int]) -> np.ndarray:
        """Cells of a partition as cells of the whole slab. ValueError for one that no partition has."""
        found = np.asarray(cells, np.int64)
        if found.size and not 0 <= found.min() <= found.max() < self.num_cells:
            raise ValueError(f"a slot is outside of a partition's {self.num_cells}")
        return found + partition * self.num_cells


def plan_to(source: Endpoint, destination: Endpoint) -> reshard.Template:
    """How a block goes from one slab to the other, whichever KV group it is of.

    Raises:
        FailedPrecondition: naming the field in which the two differ.
    """
    for field in ("transport", "fingerprint"):
        ours, theirs = getattr(source, field), getattr(destination, field)
        if ours != theirs:
            raise FailedPrecondition(f"{field} is {theirs!r} there and {ours!r} here", field=field)
    try:
        reshard.plan(source.layout, destination.layout)  # for what it raises: every group has to fit
        check_alike("source", source.layout)
        check_alike("destination", destination.layout)
        return reshard.plan(source.layout.of_group(0), destination.layout.of_group(0))
    except LayoutMismatch as error:
        raise FailedPrecondition(str(error), field=error.field) from error


def copies_between(
    source: Endpoint,
    source_cells: np.ndarray,
    destination: Endpoint,
    destination_cells: np.ndarray,
    template: reshard.Template,
) -> transfer.Copies:
    """The address ranges that move cells of one slab to cells of the other, pairwise.

    Raises what `expand` raises; for an endpoint that does not hold together KeyError, OverflowError or ValueError: it
    has no region for an owner, or one that reaches beyond 63 bits.
    """
    runs = reshard.expand(template, source_cells, destination_cells)
    remote_addresses = _bases(destination, runs.destination_owner) + runs.destination_offset_bytes
    if (remote_addresses < 0).any():
        raise ValueError("an address is beyond 63 bits")
    return transfer.Copies(
        local_addresses=_bases(source, runs.source_owner) + runs.source_offset_bytes,
        remote_addresses=remote_addresses,
        num_bytes=runs.num_bytes,
    )


def _bases(endpoint: Endpoint, owners: np.ndarray) -> np.ndarray:
    return np.array([endpoint.regions[owner].address for owner in owners.tolist()], np.int64)


# ---- on the wire


def endpoint_message(endpoint: Endpoint) -> link_pb2.KvEndpoint:
    return link_pb2.KvEndpoint(
        transport=endpoint.transport,
        session=endpoint.session,
        num_cells=endpoint.num_cells,
        regions=[
            link_pb2.KvRegion(owner=owner, address=region.address, cell_bytes=region.cell_bytes)
            for owner, region in endpoint.regions.items()
        ],
        layout=link_pb2.KvLayout(
            version=endpoint.layout.version, groups=[_group_message(group) for group in endpoint.layout.groups]
        ),
        fingerprint=endpoint.fingerprint,
    )


def endpoint_from(message: link_pb2.KvEndpoint) -> Endpoint:
    """The announced endpoint. InvalidArgument where the message is none; whether its layout fits ours is for `plan_to`
    to say.
    """
    if not _SESSION.fullmatch(message.session):
        raise InvalidArgument("the session of an endpoint is no address", field="session")
    if len({region.owner for region in message.regions}) < len(message.regions):
        raise InvalidArgument("an owner of an endpoint has two regions", field="regions")
    if sum(len(group.shards) for group in message.layout.groups) > MAX_SHARDS:
        raise InvalidArgument(f"an endpoint has at most {MAX_SHARDS} shards", field="shards")
    return Endpoint(
        transport=message.transport,
        session=message.session,
        num_cells=message.num_cells,
        regions={
            region.owner: Region(address=region.address, cell_bytes=region.cell_bytes) for region in message.regions
        },
        layout=Layout(version=message.layout.version, groups=tuple(map(_group_from, message.layout.groups))),
        fingerprint=message.fingerprint,
    )


def _group_message(group: GroupLayout) -> link_pb2.KvGroupLayout:
    block = group.block
    return link_pb2.KvGroupLayout(
        name=block.name,
        dtype=block.dtype,
        itemsize_bytes=block.itemsize_bytes,
        block_size=block.block_size,
        num_layers=block.num_layers,
        num_features=block.num_features,
        shards=[_shard_message(shard) for shard in group.shards],
    )


def _shard_message(shard: ShardLayout) -> link_pb2.KvShardLayout:
    tile = shard.tile
    return link_pb2.KvShardLayout(
        owner=shard.owner,
        layer_start=tile.layers.start,
        layer_stop=tile.layers.stop,
        token_start=tile.tokens.start,
        token_stop=tile.tokens.stop,
        feature_start=tile.features.start,
        feature_stop=tile.features.stop,
    )


def _group_from(group: link_pb2.KvGroupLayout) -> GroupLayout:
    block = BlockShape(
        name=group.name,
        dtype=group.dtype,
        itemsize_bytes=group.itemsize_bytes,
        block_size=group.block_size,
        num_layers=group.num_layers,
        num_features=group.num_features,
    )
    return GroupLayout(block=block, shards=tuple(map(_shard_from, group.shards)))


def _shard_from(shard: link_pb2.KvShardLayout) -> ShardLayout:
    tile = Tile(
        Span(shard.layer_start, shard.layer_stop),
        Span(shard.token_start, shard.token_stop),
        Span(shard.feature_start, shard.feature_stop),
    )
    return ShardLayout(owner=shard.owner, tile=tile)
