"""From plans to steps: positions, block tables and sampling parameters packed as a device program wants them.

Apart from the scheduler, which knows no padding, and from the programs, which know no requests. A decode step differs
from the one before in little more than its positions, so its rows are kept and only what changed is written again.
Exports and lands of blocks, which no plan asks for, are packed here too: here a partition's ids become the worker's.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moonshard.serving.plan import CopyPlan, DecodePlan, DecodeRow, LoadPlan, Plan, PrefillChunk, PrefillPlan
from moonshard.serving.request import Request, SequenceId, SlotId
from moonshard.serving.steps import Step, StepKind, StepShapes, bucket_for

Fields = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolShape:
    """How ids that count within a partition become rows and blocks of the whole worker."""

    num_partitions: int
    slots_per_partition: int
    blocks_per_partition: int

    @property
    def num_slots(self) -> int:
        return self.num_partitions * self.slots_per_partition

    @property
    def num_blocks(self) -> int:
        return self.num_partitions * self.blocks_per_partition

    def row(self, slot: SlotId) -> int:
        return slot.partition * self.slots_per_partition + slot.index

    def block(self, partition: int, block: int) -> int:
        return partition * self.blocks_per_partition + block

    def blocks(self, partition: int, blocks: Sequence[int]) -> np.ndarray:
        return np.asarray(blocks, np.int32) + partition * self.blocks_per_partition


class StepEncoder:
    """Packs plans. Holds the rows of the last decode step, and nothing that decides anything."""

    def __init__(self, shapes: StepShapes, pool: PoolShape):
        self._shapes = shapes
        self._pool = pool
        self._layouts = {key: shapes.layout(*key) for key in shapes.programs}
        decode = shapes.layout(StepKind.DECODE, shapes.num_slots)
        _, self._blank_rows = decode.blank()
        _, self._rows = decode.blank()
        self._written: list[tuple[SequenceId, tuple[int, ...]] | None] = [None] * pool.num_slots

    @property
    def max_transfer_blocks(self) -> int:
        """Of one export or land. ValueError for a worker whose programs have neither."""
        return max(self._shapes.transfer_buckets)

    def encode(self, plan: Plan) -> Step:
        match plan:
            case PrefillPlan():
                return self._encode_prefill(plan)
            case DecodePlan():
                return self._encode_decode(plan)
            case LoadPlan():
                return self._encode_load(plan)
            case CopyPlan():
                return self._encode_copy(plan)

    def _encode_prefill(self, plan: PrefillPlan) -> Step:
        tile = self._shapes.q_tile
        num_rows = sum(-(-len(chunk.tokens) // tile) for chunk in plan.chunks)
        bucket = bucket_for(self._shapes.prefill_buckets, num_rows * tile)
        packed, fields = self._layouts[StepKind.PREFILL, bucket].blank()
        draws, row = itertools.count(), 0
        for chunk in plan.chunks:
            self._write_chunk(fields, chunk, row)
            end = row * tile + len(chunk.tokens) - 1
            for (sequence, slot), draw in zip(chunk.samples, draws, strict=False):
                fields["sample_from"][draw] = end
                fields["sample_slot"][draw] = self._pool.row(slot)
                position = chunk.start + len(chunk.tokens)
                _write_sampling(fields, draw, chunk.request, sequence.choice)
                _write_position(fields, draw, chunk.request, position)
            row += -(-len(chunk.tokens) // tile)
        return Step(plan.number, StepKind.PREFILL, bucket, packed)

    def _write_chunk(self, fields: Fields, chunk: PrefillChunk, first_row: int) -> None:
        tile, count = self._shapes.q_tile, len(chunk.tokens)
        num_rows = -(-count // tile)
        begin = first_row * tile
        fields["tokens"].reshape(-1)[begin : begin + count] = chunk.tokens
        fields["positions"].reshape(-1)[begin : begin + count] = np.arange(chunk.start, chunk.start + count)
        table = self._pool.blocks(chunk.slot.partition, chunk.block_table)
        fields["block_tables"][first_row : first_row + num_rows, : len(table)] = table

    def _encode_decode(self, plan: DecodePlan) -> Step:
        bucket = bucket_for(self._shapes.decode_buckets, len(plan.rows))
        for index, row in enumerate(plan.rows):
            self._write_row(index, row)
        for index in range(len(plan.rows), bucket):
            if self._written[index] is not None:
                self._clear_row(index)
        packed, fields = self._layouts[StepKind.DECODE, bucket].blank()
        for name, field in fields.items():
            field[...] = self._rows[name][:bucket]
        return Step(plan.number, StepKind.DECODE, bucket, packed)

    def _write_row(self, index: int, row: DecodeRow) -> None:
        fields, written = self._rows, self._written[index]
        if written is None or written[0] is not row.sequence:  # an equal id may be of another request
            _write_sampling(fields, index, row.request, row.sequence.choice)
        if written is None or written[1] is not row.block_table:
            table = self._pool.blocks(row.slot.partition, row.block_table)
            fields["block_tables"][index, : len(table)] = table
        self._written[index] = (row.sequence, row.block_table)
        fields["slot"][index] = self._pool.row(row.slot)  # preempted, a sequence may come back to its row in another
        fields["positions"][index] = row.position
        _write_position(fields, index, row.request, row.position + 1)

    def _clear_row(self, index: int) -> None:
        for name, field in self._rows.items():
            field[index] = self._blank_rows[name][index]
        self._written[index] = None

    def _encode_load(self, plan: LoadPlan) -> Step:
        packed, fields = self._layouts[StepKind.LOAD, 0].blank()
        request, bias = plan.request, plan.request.sampling.logit_bias
        fields["slot"][...] = self._pool.row(plan.slot)
        fields["num_prompt"][...] = plan.num_prompt
        fields["num_history"][...] = len(plan.history)
        fields["history"][: len(plan.history)] = plan.history
        fields["bias_ids"][: len(bias)] = list(bias.keys())
        fields["bias_values"][: len(bias)] = list(bias.values())
        fields["stop_ids"][: len(request.stop_token_ids)] = sorted(request.stop_token_ids)
        return Step(plan.number, StepKind.LOAD, 0, packed)

    def _encode_copy(self, plan: CopyPlan) -> Step:
        packed, fields = self._layouts[StepKind.COPY, 0].blank()
        for index, (partition, source, destination) in enumerate(plan.pairs):
            fields["source"][index] = self._pool.block(partition, source)
            fields["destination"][index] = self._pool.block(partition, destination)
        return Step(plan.number, StepKind.COPY, 0, packed)

    def encode_export(self, number: int, partition: int, blocks: Sequence[int]) -> Step:
        """Read blocks of one partition, at most as many as the largest transfer bucket."""
        bucket = bucket_for(self._shapes.transfer_buckets, len(blocks))
        packed, fields = self._layouts[StepKind.EXPORT, bucket].blank()
        fields["source"][: len(blocks)] = self._pool.blocks(partition, blocks)
        return Step(number, StepKind.EXPORT, bucket, packed)

    def encode_land(self, number: int, partition: int, blocks: Sequence[int], payload: np.ndarray) -> Step:
        """Overwrite them with `payload` [len(blocks), ...], which is copied only where the bucket has more room."""
        bucket = bucket_for(self._shapes.transfer_buckets, len(blocks))
        packed, fields = self._layouts[StepKind.LAND, bucket].blank()
        fields["destination"][: len(blocks)] = self._pool.blocks(partition, blocks)
        if bucket > len(blocks):
            padded = np.zeros((bucket, *payload.shape[1:]), payload.dtype)
            padded[: len(blocks)] = payload
            payload = padded
        return Step(number, StepKind.LAND, bucket, packed, payload)


def _write_sampling(fields: Fields, row: int, request: Request, choice: int) -> None:
    sampling = request.sampling
    fields["temperature"][row] = sampling.temperature
    fields["top_p"][row] = sampling.top_p
    fields["top_k"][row] = sampling.top_k
    fields["min_p"][row] = sampling.min_p
    fields["repetition_penalty"][row] = sampling.repetition_penalty
    fields["presence_penalty"][row] = sampling.presence_penalty
    fields["frequency_penalty"][row] = sampling.frequency_penalty
    fields["seed"][row] = (sampling.seed >> 32, sampling.seed & 0xFFFFFFFF)
    fields["choice"][row] = choice
    fields["has_bias"][row] = bool(sampling.logit_bias)
    fields["wants_logprobs"][row] = request.num_logprobs is not None


def _write_position(fields: Fields, row: int, request: Request, position: int) -> None:
    """`position` is that of the token to be drawn."""
    fields["sample_position"][row] = position
    is_early = position - len(request.prompt) < request.min_tokens
    fields["bans_stops"][row] = is_early and bool(request.stop_token_ids)
