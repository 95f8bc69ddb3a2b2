"""A handoff's messages on the Link and back, for all three sides.

Workers and the gateway use it, while `wire.requests`, which translates requests and their outputs, is for workers
alone. Epochs are 16 bytes on the wire and integers inside. What comes over the wire is checked for what would otherwise
fail far away: the length of ids, columns that do not pair up. Where KV is written to is translated in
`transfer.endpoint`.
"""

from collections.abc import Iterable, Sequence

from moonshard.rpc import link_pb2
from moonshard.rpc.link import EPOCH_BYTES, REQUEST_ID_BYTES
from moonshard.rpc.status import InvalidArgument
from moonshard.serving.control.handoff import messages as m
from moonshard.serving.wire.tiles import tile_from, tile_message
from moonshard.sharding.layout import Tile

MAX_DURATION_S = 86_400.0
MAX_PIECES = 1024  # of a block: what it takes to check that they make it up grows with their square

_CAUSES = {link_pb2.HandoffCause.Value(f"HANDOFF_CAUSE_{cause.name}"): cause for cause in m.Cause}


def epoch_from(epoch: bytes, field: str = "epoch") -> int:
    """Raises InvalidArgument naming `field` for one of another size."""
    if len(epoch) != EPOCH_BYTES:
        raise InvalidArgument(f"an epoch has {EPOCH_BYTES} bytes, not {len(epoch)}", field=field)
    return int.from_bytes(epoch, "big")


def handoff_from(handoff: bytes) -> bytes:
    """Raises InvalidArgument for an id of another size."""
    if len(handoff) != REQUEST_ID_BYTES:
        raise InvalidArgument(f"a handoff's id has {REQUEST_ID_BYTES} bytes, not {len(handoff)}", field="handoff")
    return handoff


def is_duration(seconds: float) -> bool:
    """Above zero and at most a day: no NaN, and nothing that overflows when it is added to a clock."""
    return 0 < seconds <= MAX_DURATION_S


def epoch_bytes(epoch: int) -> bytes:
    return epoch.to_bytes(EPOCH_BYTES, "big")


# ---- gateway to workers


def reserve_message(reserve: m.Reserve, run: link_pb2.Run) -> link_pb2.Reserve:
    """`run` is the request as it goes to both legs; its id is the handoff's."""
    return link_pb2.Reserve(
        run=run,
        writer_epoch=epoch_bytes(reserve.writer_epoch),
        lease_s=reserve.lease_s,
    )


def reserve_from(reserve: link_pb2.Reserve) -> m.Reserve:
    """Raises InvalidArgument naming the field. The id of its run was checked."""
    if not is_duration(reserve.lease_s):
        raise InvalidArgument(f"a lease of {reserve.lease_s:g} s is none", field="lease_s")
    return m.Reserve(
        handoff=reserve.run.request_id,
        writer_epoch=epoch_from(reserve.writer_epoch, "writer_epoch"),
        lease_s=reserve.lease_s,
    )


def run_message(
    run: link_pb2.Run, target: link_pb2.Target, endpoint: link_pb2.KvEndpoint, partition: int | None = None
) -> link_pb2.Run:
    """A copy of `run` for the prefill worker, in that worker's partition; None: it chooses one."""
    prefill = link_pb2.Run()
    prefill.CopyFrom(run)
    prefill.ClearField("partition")
    if partition is not None:
        prefill.partition = partition
    prefill.target.CopyFrom(target)
    prefill.endpoint.CopyFrom(endpoint)
    return prefill


def start_message(
    handoff: bytes, tokens: Sequence[int], last: link_pb2.Manifest, guesses: Sequence[Sequence[int]] = ()
) -> link_pb2.Start:
    told = [link_pb2.Guesses(token_ids=each) for each in guesses]
    return link_pb2.Start(handoff=handoff, token_ids=tokens, last=last, guesses=told)


def start_from(start: link_pb2.Start) -> m.Start[m.Manifest]:
    return m.Start(
        handoff=handoff_from(start.handoff),
        tokens=tuple(start.token_ids),
        last=manifest_from(start.last),
        guesses=tuple(tuple(each.token_ids) for each in start.guesses),
    )


def cancel_message(cancel: m.Cancel) -> link_pb2.Cancel:
    return link_pb2.Cancel(request_id=cancel.handoff, target_epoch=epoch_bytes(cancel.target_epoch))


# ---- decode worker to gateway, and on to the prefill worker


def target_message(target: m.Target, *, queue_ms: float = 0.0) -> link_pb2.Target:
    """`queue_ms`: how long the reservation waited for room, for the gateway to record."""
    return link_pb2.Target(
        handoff=target.handoff,
        epoch=epoch_bytes(target.epoch),
        writer_epoch=epoch_bytes(target.writer_epoch),
        session=target.session,
        partition=target.partition,
        num_blocks=target.num_blocks,
        num_blocks_held=target.num_blocks_held,
        grants=_grant_messages(target.grants),
        lease_s=target.lease_s,
        queue_ms=queue_ms,
    )


def target_from(target: link_pb2.Target) -> m.Target:
    return m.Target(
        handoff=handoff_from(target.handoff),
        epoch=epoch_from(target.epoch),
        writer_epoch=epoch_from(target.writer_epoch, "writer_epoch"),
        session=target.session,
        partition=target.partition,
        num_blocks=target.num_blocks,
        num_blocks_held=target.num_blocks_held,
        grants=_grants(target.grants),
        lease_s=target.lease_s,
    )


def credits_message(credits: m.Credits) -> link_pb2.Credits:
    return link_pb2.Credits(
        handoff=credits.handoff,
        target_epoch=epoch_bytes(credits.target_epoch),
        grants=_grant_messages(credits.grants),
    )


def credits_from(credits: link_pb2.Credits) -> m.Credits:
    return m.Credits(
        handoff=handoff_from(credits.handoff),
        target_epoch=epoch_from(credits.target_epoch, "target_epoch"),
        grants=_grants(credits.grants),
    )


# ---- prefill worker to gateway, and on to the decode worker


def manifest_message(
    manifest: m.Manifest, pieces: Iterable[Tile], phases: link_pb2.TransferPhases | None = None
) -> link_pb2.Manifest:
    """`pieces`: that its checksums are of; none: whole blocks."""
    return link_pb2.Manifest(
        handoff=manifest.handoff,
        writer_epoch=epoch_bytes(manifest.writer_epoch),
        target_epoch=epoch_bytes(manifest.target_epoch),
        blocks=manifest.blocks,
        grants=_grant_messages(manifest.grants),
        checksums=manifest.checksums,
        is_last=manifest.is_last,
        phases=phases,
        pieces=map(tile_message, pieces),
    )


def check_columns(manifest: link_pb2.Manifest) -> None:
    num_checksums = len(manifest.blocks) * max(1, len(manifest.pieces))
    if len(manifest.blocks) != len(manifest.grants) or len(manifest.checksums) != num_checksums:
        raise InvalidArgument("blocks, grants and checksums of a manifest do not pair up", field="blocks")


def manifest_from(manifest: link_pb2.Manifest) -> m.Manifest:
    check_columns(manifest)
    if len(manifest.pieces) > MAX_PIECES:
        raise InvalidArgument(f"a block of a manifest has at most {MAX_PIECES} pieces", field="pieces")
    return m.Manifest(
        handoff=handoff_from(manifest.handoff),
        writer_epoch=epoch_from(manifest.writer_epoch, "writer_epoch"),
        target_epoch=epoch_from(manifest.target_epoch, "target_epoch"),
        blocks=tuple(manifest.blocks),
        grants=_grants(manifest.grants),
        checksums=tuple(manifest.checksums),
        is_last=manifest.is_last,
        pieces=tuple(map(tile_from, manifest.pieces)),
    )


def first_tokens_message(first: m.FirstTokens, outputs: Iterable[link_pb2.SequenceOutput]) -> link_pb2.FirstTokens:
    """`outputs`: one for each choice, in their order, with what the client is told beside the token."""
    return link_pb2.FirstTokens(
        handoff=first.handoff,
        writer_epoch=epoch_bytes(first.writer_epoch),
        target_epoch=epoch_bytes(first.target_epoch),
        outputs=outputs,
    )


def first_tokens_from(first: link_pb2.FirstTokens) -> m.FirstTokens:
    """Raises InvalidArgument where a choice has not exactly one token."""
    if any(len(output.token_ids) != 1 for output in first.outputs):
        raise InvalidArgument("each choice has one first token", field="outputs")
    return m.FirstTokens(
        handoff=handoff_from(first.handoff),
        writer_epoch=epoch_from(first.writer_epoch, "writer_epoch"),
        target_epoch=epoch_from(first.target_epoch, "target_epoch"),
        tokens=tuple(output.token_ids[0] for output in first.outputs),
        is_finished=all(output.finish_reason for output in first.outputs),
        guesses=m.guesses_of(tuple(output.guesses) for output in first.outputs),
    )


def drained_message(drained: m.Drained) -> link_pb2.Drained:
    return link_pb2.Drained(
        handoff=drained.handoff,
        writer_epoch=epoch_bytes(drained.writer_epoch),
        target_epoch=epoch_bytes(drained.target_epoch),
    )


def drained_from(drained: link_pb2.Drained) -> m.Drained:
    return m.Drained(
        handoff=handoff_from(drained.handoff),
        writer_epoch=epoch_from(drained.writer_epoch, "writer_epoch"),
        target_epoch=epoch_from(drained.target_epoch, "target_epoch"),
    )


# ---- either worker to gateway


def failed_message(handoff: bytes, cause: m.Cause, *, retry_after_s: float = 0.0) -> link_pb2.Failed:
    return link_pb2.Failed(
        request_id=handoff, message=cause.value, retry_after_s=retry_after_s, cause=f"HANDOFF_CAUSE_{cause.name}"
    )


def cause_from(failed: link_pb2.Failed) -> m.Cause | None:
    """None where no handoff failed, but a request was refused."""
    return _CAUSES.get(failed.cause)


def _grant_messages(grants: tuple[m.Grant, ...]) -> list[link_pb2.Grant]:
    return [link_pb2.Grant(cell=grant.cell, number=grant.number) for grant in grants]


def _grants(grants: Iterable[link_pb2.Grant]) -> tuple[m.Grant, ...]:
    return tuple(m.Grant(grant.cell, grant.number) for grant in grants)
