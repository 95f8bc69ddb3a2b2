"""What a gateway passes on between the two workers of a handoff: the message as it came, and what is read of it.

A message names its handoff and the processes that it is of and for; these are read and checked. Which cells, blocks and
checksums it lists is between the workers, and for the one that uses them to check (`wire.handoffs`). Where lists cannot
even belong together, whoever said so is at fault and not the request: that is noticed here, without a look at them.
"""

from dataclasses import dataclass

from moonshard.rpc import link_pb2
from moonshard.serving.wire.handoffs import check_columns, epoch_from, handoff_from


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayedTarget:
    """A decode worker's Target, for the prefill worker's Run."""

    handoff: bytes
    epoch: int
    writer_epoch: int
    message: link_pb2.Target


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayedCredits:
    """A decode worker's Credits, for the prefill worker."""

    handoff: bytes
    message: link_pb2.Credits


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayedManifest:
    """A prefill worker's manifest, for the decode worker: by itself, or within Start if it is the last."""

    handoff: bytes
    writer_epoch: int
    target_epoch: int
    is_last: bool
    message: link_pb2.Manifest


def relayed_target(target: link_pb2.Target) -> RelayedTarget:
    """Raises InvalidArgument naming the field; so do the other functions of this module."""
    return RelayedTarget(
        handoff=handoff_from(target.handoff),
        epoch=epoch_from(target.epoch),
        writer_epoch=epoch_from(target.writer_epoch, "writer_epoch"),
        message=target,
    )


def relayed_credits(credits: link_pb2.Credits) -> RelayedCredits:
    handoff = handoff_from(credits.handoff)
    epoch_from(credits.target_epoch, "target_epoch")
    return RelayedCredits(handoff=handoff, message=credits)


def relayed_manifest(manifest: link_pb2.Manifest) -> RelayedManifest:
    check_columns(manifest)
    return RelayedManifest(
        handoff=handoff_from(manifest.handoff),
        writer_epoch=epoch_from(manifest.writer_epoch, "writer_epoch"),
        target_epoch=epoch_from(manifest.target_epoch, "target_epoch"),
        is_last=manifest.is_last,
        message=manifest,
    )
