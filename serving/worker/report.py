"""What a worker says of itself, as messages: who it is, how it is loaded, and what its pools hold.

When it is said is `worker.links`' and `worker.link_service`'s.
"""

from collections.abc import Mapping, Sequence

from moonshard.kv.blocks import BlockPool, PartitionCounts
from moonshard.kv.prefix import Below
from moonshard.kv.store.tier import TierCounters
from moonshard.rpc import link_pb2
from moonshard.rpc.link import PROTOCOL_VERSION
from moonshard.serving.config.keys import WorkerRole
from moonshard.serving.control.batching.counters import Counters
from moonshard.serving.control.tiers.writes import WriteQueue
from moonshard.serving.engine.loading.model import LoadedModel
from moonshard.serving.transfer.endpoint import Endpoint, endpoint_message
from moonshard.serving.transfer.plane import Plane
from moonshard.serving.wire.tiers import tier_message


def welcome_message(
    model: LoadedModel, *, role: WorkerRole, epoch: bytes, endpoint: Endpoint | None, num_processes: int
) -> link_pb2.Welcome:
    """`endpoint`: where KV for this worker is written to; None where it takes none. `num_processes`: with tiers."""
    return link_pb2.Welcome(
        protocol_version=PROTOCOL_VERSION,
        epoch=epoch,
        fingerprint=model.fingerprint,
        role=role,
        dtype=model.dtype,
        vocab_size=model.vocab_size,
        max_context_tokens=model.shapes.max_context_tokens,
        block_size=model.block_size,
        num_partitions=model.pool.num_partitions,
        num_blocks=model.pool.blocks_per_partition,
        max_slots=model.pool.num_slots,
        load_s=model.load_s,
        compile_s=model.compile_s,
        kernels=model.kernels,
        num_processes=num_processes,
        endpoint=None if endpoint is None else endpoint_message(endpoint),
    )


def load_message(counters: Counters, **rest: object) -> link_pb2.WorkerLoad:
    """`rest`: the fields of WorkerLoad that the scheduler does not know."""
    totals = counters.totals
    return link_pb2.WorkerLoad(
        num_running=counters.num_running,
        num_waiting=counters.num_waiting,
        queued_tokens=counters.queued_tokens,
        active_tokens=counters.active_tokens,
        num_preemptions=totals.num_preemptions,
        num_prefill_steps=totals.num_prefill_steps,
        num_decode_steps=totals.num_decode_steps,
        prefill_tokens=totals.prefill_tokens,
        decode_tokens=totals.decode_tokens,
        wasted_tokens=totals.wasted_tokens,
        num_drafts=totals.num_drafts,
        draft_tokens=totals.draft_tokens,
        accepted_tokens=totals.accepted_tokens,
        accepted_per_position=totals.accepted_per_position,
        cached_tokens=totals.cached_tokens,
        **rest,  # pyright: ignore[reportArgumentType]  # named by the caller, checked by protobuf
    )


def kv_transfer_message(plane: Plane, slab: BlockPool, num_handoffs: int) -> link_pb2.KvTransfer:
    """The KV plane as it is now, with the slab's cells summed over the partitions."""
    counters = plane.counters
    counts = [slab.counts(partition) for partition in range(slab.num_partitions)]
    return link_pb2.KvTransfer(
        num_handoffs=num_handoffs,
        published_bytes=counters.num_bytes,
        num_transfers=counters.num_transfers,
        publish_s=counters.busy_s,
        num_failures={cause.value: num for cause, num in counters.num_failures.items()},
        landed_bytes=plane.num_landed_blocks * plane.block_bytes,
        num_landed_blocks=plane.num_landed_blocks,
        num_checksum_mismatches=plane.num_mismatches,
        free_slab_slots=sum(count.free for count in counts),
        used_slab_slots=sum(count.used for count in counts),
        leased_slab_slots=sum(count.leased for count in counts),
        quarantined_slab_slots=sum(count.quarantined for count in counts),
        total_slab_slots=sum(count.total for count in counts),
    )


def store_message(
    counters: Mapping[str, TierCounters], queues: Sequence[WriteQueue], *, num_late: int, shares: Mapping[Below, float]
) -> link_pb2.KvStore:
    """The tiers below the device's pages as they are now."""
    return link_pb2.KvStore(
        tiers=[tier_message(name, tier) for name, tier in counters.items()],
        num_late_fetches=num_late,
        num_queued_blocks=sum(map(len, queues)),
        num_aside_blocks=sum(queue.num_aside for queue in queues),
        num_dropped_blocks=sum(queue.num_dropped for queue in queues),
        num_lost_blocks=sum(queue.num_lost for queue in queues),
        own_fetch_share=shares[Below.OWN],
        shared_fetch_share=shares[Below.SHARED],
    )


def partition_state(counts: PartitionCounts, *, num_free_slots: int, num_slots: int) -> link_pb2.PartitionState:
    return link_pb2.PartitionState(
        free_blocks=counts.free,
        used_blocks=counts.used,
        leased_blocks=counts.leased,
        quarantined_blocks=counts.quarantined,
        total_blocks=counts.total,
        free_slots=num_free_slots,
        total_slots=num_slots,
    )
