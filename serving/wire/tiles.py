"""A part of a block on the wire: in endpoints, in manifests, and in what the members of a gang are told."""

from moonshard.rpc import link_pb2
from moonshard.sharding.layout import Span, Tile


def tile_message(tile: Tile) -> link_pb2.KvTile:
    return link_pb2.KvTile(
        layer_start=tile.layers.start,
        layer_stop=tile.layers.stop,
        token_start=tile.tokens.start,
        token_stop=tile.tokens.stop,
        feature_start=tile.features.start,
        feature_stop=tile.features.stop,
    )


def tile_from(tile: link_pb2.KvTile) -> Tile:
    return Tile(
        Span(tile.layer_start, tile.layer_stop),
        Span(tile.token_start, tile.token_stop),
        Span(tile.feature_start, tile.feature_stop),
    )
