"""Tiers on the wire: what a worker tells of them, and what the members of a gang ask one another."""

from collections.abc import Mapping, Sequence

from moonshard.kv.prefix import BlockName, split_names
from moonshard.kv.store.stack import FetchedRun
from moonshard.kv.store.tier import MissCause, TierCounters
from moonshard.rpc import link_pb2
from moonshard.serving.control.tiers.piece import Piece


def tier_message(name: str, counters: TierCounters) -> link_pb2.KvTier:
    return link_pb2.KvTier(
        name=name,
        num_hits=counters.num_hits,
        num_misses={cause.value: num for cause, num in counters.num_misses.items()},
        num_kept=counters.num_kept,
        num_not_kept=counters.num_not_kept,
        num_evicted=counters.num_evicted,
        read_bytes=counters.bytes_read,
        written_bytes=counters.bytes_written,
        held_bytes=counters.bytes_held,
        is_up=counters.is_up,
    )


def counters_from(tier: link_pb2.KvTier) -> TierCounters:
    return TierCounters(
        num_hits=tier.num_hits,
        num_misses={MissCause(cause): num for cause, num in tier.num_misses.items()},
        num_kept=tier.num_kept,
        num_not_kept=tier.num_not_kept,
        num_evicted=tier.num_evicted,
        bytes_read=tier.read_bytes,
        bytes_written=tier.written_bytes,
        bytes_held=tier.held_bytes if tier.HasField("held_bytes") else None,
        is_up=tier.is_up if tier.HasField("is_up") else None,
    )


def chain_message(names: Sequence[BlockName]) -> link_pb2.TierChain:
    return link_pb2.TierChain(names=b"".join(names))


def piece_message(ticket: int, piece: Piece) -> link_pb2.TierPiece:
    return link_pb2.TierPiece(
        ticket=ticket,
        partition=piece.partition,
        names=b"".join(piece.names),
        parents=[parent or b"" for parent in piece.parents],
        again_for=piece.again_for,
    )


def piece_from(piece: link_pb2.TierPiece) -> Piece:
    return Piece(
        partition=piece.partition,
        names=tuple(split_names(piece.names)),
        parents=tuple(parent or None for parent in piece.parents),
        again_for=piece.again_for if piece.HasField("again_for") else None,
    )


def run_message(run: FetchedRun) -> link_pb2.TierRun:
    return link_pb2.TierRun(tier=run.tier, num_asked=run.num_asked, num_blocks=run.num_blocks, seconds=run.seconds)


def run_from(run: link_pb2.TierRun) -> FetchedRun:
    return FetchedRun(tier=run.tier, num_asked=run.num_asked, num_blocks=run.num_blocks, seconds=run.seconds)


def names_message(by_tier: Mapping[str, Sequence[BlockName]]) -> link_pb2.TierNames:
    return link_pb2.TierNames(by_tier={tier: b"".join(names) for tier, names in by_tier.items()})


def names_from(names: link_pb2.TierNames) -> dict[str, list[BlockName]]:
    return {tier: split_names(joined) for tier, joined in names.by_tier.items()}
