"""Where a decode worker's landing slab is and how KV lies in it, as it is announced, and what a writer makes of it.

A worker of several processes has a slab in each, and the regions say in whose they are. The writer intersects the
announced layout with its own (`sharding.reshard`) and turns cells into addresses; whether the two fit is found here,
before a byte moves. Bytes are moved by `plane`; which cells may be written is decided in `control.handoff`.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from moonshard.kv import transfer
from moonshard.kv.slab_shards import Region
from moonshard.rpc import link_pb2
from moonshard.rpc.status import FailedPrecondition, InvalidArgument
from moonshard.serving.wire.tiles import tile_from, tile_message
from moonshard.sharding import reshard
from moonshard.sharding.layout import (
    BlockShape,
    GroupLayout,
    Layout,
    LayoutMismatch,
    ShardLayout,
    check_alike,
)

MAX_SHARDS = 1024  # of a partition: what a plan takes grows with their square
_SESSION = re.compile(r"[\x21-\x7e]{1,512}")


class Place(NamedTuple):
    """Whose region one is: that of an owner of the layout, in one of the partitions."""

    partition: int
    owner: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """The slabs of a worker that KV is written from or into, or that of one of its processes."""

    transport: str
    session: str
    num_cells: int  # per partition
    regions: Mapping[Place, Region]
    sessions: Mapping[Place, str]  # of whose process each region is
    layout: Layout
    fingerprint: str

    def checked(self, cells: Sequence[int]) -> np.ndarray:
        """Cells of a partition. ValueError for one that no partition has."""
        found = np.asarray(cells, np.int64)
        if found.size and not 0 <= found.min() <= found.max() < self.num_cells:
            raise ValueError(f"a slot is outside of a partition's {self.num_cells}")
        return found


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


class Cells(NamedTuple):
    """Cells of one partition of an endpoint's slabs."""

    endpoint: Endpoint
    partition: int
    cells: Sequence[int]


def copies_between(source: Cells, destination: Cells, template: reshard.Template) -> Mapping[str, transfer.Copies]:
    """The address ranges that move cells to others, pairwise, by the session that they are written to.

    Only those of owners for whom the source has regions: of several processes each sends what it has.

    Raises what `expand` raises; for an endpoint that does not hold together KeyError, OverflowError or ValueError: it
    has no region for an owner, one that reaches beyond 63 bits, or no such cell.
    """
    runs = reshard.expand(
        template, source.endpoint.checked(source.cells), destination.endpoint.checked(destination.cells)
    )
    remote_addresses = _bases(destination, runs.destination_owner) + runs.destination_offset_bytes
    if (remote_addresses < 0).any():
        raise ValueError("an address is beyond 63 bits")
    ours = _by_owner(source, runs.source_owner, source.endpoint.regions.__contains__, bool)
    sessions = _by_owner(destination, runs.destination_owner, destination.endpoint.sessions.__getitem__, str)
    found = {}
    for session in dict.fromkeys(sessions[ours].tolist()):
        chosen = ours & (sessions == session)
        found[session] = transfer.Copies(
            local_addresses=_bases(source, runs.source_owner[chosen]) + runs.source_offset_bytes[chosen],
            remote_addresses=remote_addresses[chosen],
            num_bytes=runs.num_bytes[chosen],
        )
    return found


def _bases(cells: Cells, owners: np.ndarray) -> np.ndarray:
    """Addresses. A value beyond 63 bits is an OverflowError."""
    return _by_owner(cells, owners, lambda place: cells.endpoint.regions[place].address, np.int64)


def _by_owner(cells: Cells, owners: np.ndarray, of: Callable[[Place], Any], dtype: type) -> np.ndarray:
    distinct, rows = np.unique(owners, return_inverse=True)
    return np.array([of(Place(cells.partition, owner)) for owner in distinct.tolist()], dtype)[rows]


# ---- on the wire


def endpoint_message(endpoint: Endpoint) -> link_pb2.KvEndpoint:
    return link_pb2.KvEndpoint(
        transport=endpoint.transport,
        session=endpoint.session,
        num_cells=endpoint.num_cells,
        regions=region_messages(endpoint),
        layout=link_pb2.KvLayout(
            version=endpoint.layout.version, groups=[_group_message(group) for group in endpoint.layout.groups]
        ),
        fingerprint=endpoint.fingerprint,
    )


def region_messages(endpoint: Endpoint) -> list[link_pb2.KvRegion]:
    return [
        link_pb2.KvRegion(
            partition=place.partition,
            owner=place.owner,
            address=region.address,
            cell_bytes=region.cell_bytes,
            session="" if endpoint.sessions[place] == endpoint.session else endpoint.sessions[place],
        )
        for place, region in endpoint.regions.items()
    ]


def regions_from(messages: Iterable[link_pb2.KvRegion]) -> dict[Place, Region]:
    """InvalidArgument where two are one owner's."""
    regions = {}
    for message in messages:
        place = Place(message.partition, message.owner)
        if place in regions:
            raise InvalidArgument("an owner of an endpoint has two regions", field="regions")
        regions[place] = Region(address=message.address, cell_bytes=message.cell_bytes)
    return regions


def endpoint_from(message: link_pb2.KvEndpoint) -> Endpoint:
    """The announced endpoint. InvalidArgument where the message is none; whether its layout fits ours is for `plan_to`
    to say.
    """
    sessions = {Place(region.partition, region.owner): region.session or message.session for region in message.regions}
    for session in {message.session, *sessions.values()}:
        if not _SESSION.fullmatch(session):
            raise InvalidArgument("the session of an endpoint is no address", field="session")
    if sum(len(group.shards) for group in message.layout.groups) > MAX_SHARDS:
        raise InvalidArgument(f"an endpoint has at most {MAX_SHARDS} shards", field="shards")
    return Endpoint(
        transport=message.transport,
        session=message.session,
        num_cells=message.num_cells,
        regions=regions_from(message.regions),
        sessions=sessions,
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
    return link_pb2.KvShardLayout(owner=shard.owner, tile=tile_message(shard.tile))


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
    return ShardLayout(owner=shard.owner, tile=tile_from(shard.tile))
