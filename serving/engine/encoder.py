"""From plans to steps: positions, block tables and sampling parameters packed as a device program wants them.

The scheduler knows no padding and the programs know no requests: both meet only here. A decode step differs from the
one before in little more than its positions, so its rows are kept and only what changed is written again. Exports and
lands of blocks, which no plan asks for, are packed here too. Every partition has a row of its own in the packed array,
with slots and blocks as the partition counts them.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from moonshard.serving.control.plan import (
    CopyPlan,
    DecodePlan,
    DecodeRow,
    LoadPlan,
    Plan,
    PrefillChunk,
    PrefillPlan,
)
from moonshard.serving.control.request import Request, SequenceId, SlotId
from moonshard.serving.control.sampling_parameters import PARAMETERS
from moonshard.serving.engine.scoring.prompts import scored_places, write_tiles
from moonshard.serving.engine.steps import GUESS_AFTER, Step, StepKind, StepShapes, smallest

Fields = Mapping[str, np.ndarray]

# the kinds of decode steps, each with the kind of its draws
_DECODES = {
    StepKind.DECODE: StepKind.DRAW,
    StepKind.VERIFY: StepKind.ACCEPT,
}


class _Written(NamedTuple):
    """What stands in a row, by identity: an equal id may be of another request."""

    sequence: SequenceId
    block_table: tuple[int, ...]
    slot: SlotId


class StepEncoder:
    """Packs plans into steps. It holds the rows of the last decode step, and decides nothing."""

    def __init__(self, shapes: StepShapes, bucket_for: Callable[[StepKind, int], int] | None = None):
        """`bucket_for`: the bucket of a kind that holds a size; by default the smallest of the shapes' that does."""
        self._shapes = shapes
        sizes = shapes.buckets
        self._bucket_for = bucket_for or (lambda kind, size: smallest(sizes[kind], size))
        self._layouts = {key: shapes.layout(*key) for key in shapes.programs}
        self._places = () if shapes.groups.is_plain else _places(shapes)
        widest = StepKind.VERIFY if shapes.q_len > 1 else StepKind.DECODE
        decode, draw = shapes.layout(widest, shapes.slots_per_partition), self._layouts[_DECODES[widest], 0]
        self._blank_rows = decode.blank()[1] | draw.blank()[1]
        _, rows = decode.blank(shapes.num_partitions)
        self._drawn, draws = draw.blank(shapes.num_partitions)  # of the last decode step
        self._rows = [_of(rows | draws, partition) for partition in range(shapes.num_partitions)]
        self._written: list[list[_Written | None]] = [[None] * shapes.slots_per_partition for _ in self._rows]
        self._num_written = [0] * shapes.num_partitions  # rows, from the first on: those behind them are blank
        self._decodes = {(kind, size): self._blank(kind, size) for kind in _DECODES for size in sizes.get(kind, ())}

    @property
    def max_transfer_blocks(self) -> int:
        """The most blocks of one export or land. ValueError for a worker whose programs have neither."""
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
        by_partition = self._by_partition(plan.chunks)
        num_padded = max(map(self._num_padded, by_partition))
        is_scored = any(chunk.is_scored for chunk in plan.chunks)
        bucket = self._scored_bucket(num_padded) if is_scored else self._bucket_for(StepKind.PREFILL, num_padded)
        packed, fields = self._blank(StepKind.PREFILL, bucket)
        sampling, sampling_fields = self._blank(StepKind.DRAW)
        first_draws = itertools.count(0, self._shapes.slots_per_partition)
        draws: dict[SequenceId, int] = {}
        for partition, (chunks, first_draw) in enumerate(zip(by_partition, first_draws, strict=False)):
            own = _of(fields, partition) | _of(sampling_fields, partition)
            for index, sequence in enumerate(self._write_chunks(own, chunks)):
                draws[sequence] = first_draw + index
        order = (sequence for chunk in plan.chunks for sequence, _ in chunk.samples)
        scoring, scored = self._scoring(plan, bucket) if is_scored else (None, ())
        guessing = self._guesses_after_prefill(by_partition, bucket, bool(draws)) if self._shapes.num_ahead else None
        return Step(
            plan.number,
            StepKind.PREFILL,
            bucket,
            packed,
            sampling=sampling if draws else None,
            scoring=scoring,
            scored=scored,
            guessing=guessing,
            num_ahead=self._shapes.num_ahead if draws else 0,
            draws=tuple(draws[each] for each in order),
        )

    def _guesses_after_prefill(self, by_partition: list[list[PrefillChunk]], bucket: int, is_drawn: bool) -> np.ndarray:
        """The packed guesses behind a prefill: the token that follows each of its tokens."""
        packed, fields = self._blank(StepKind.GUESS_PREFILL, bucket)
        fields["num_ahead"][...] = self._shapes.num_ahead if is_drawn else 0
        for partition, chunks in enumerate(by_partition):
            following, num_blocks = fields["following"][partition].reshape(-1), fields["num_blocks"][partition]
            row = draw = 0
            for chunk in chunks:
                begin = row * self._shapes.q_tile
                end = begin + len(chunk.tokens) - 1
                following[begin:end] = chunk.tokens[1:]
                following[end] = -1 - chunk.samples[0][1].index if chunk.next_token is None else chunk.next_token
                # of those forked from a sequence the row behind the prompt has its token, and so no guesses of theirs
                if chunk.samples:
                    num_blocks[draw] = len(chunk.block_table)
                draw += len(chunk.samples)
                row += self._num_rows(chunk)
        return packed

    def _scored_bucket(self, size: int) -> int:
        """The smallest bucket that holds `size` and has both programs: the largest has."""
        bucket = self._bucket_for(StepKind.SCORE, size)
        while (found := self._bucket_for(StepKind.PREFILL, bucket)) > bucket:
            bucket = self._bucket_for(StepKind.SCORE, found)
        return bucket

    def _scoring(self, plan: PrefillPlan, bucket: int) -> tuple[np.ndarray, tuple[slice, ...]]:
        """The packed scores' row of each partition, and where the rows of each scored chunk are among all tokens."""
        packed, fields = self._blank(StepKind.SCORE, bucket)
        places = scored_places(plan, bucket, self._num_rows, self._shapes.q_tile)
        for chunk, place in places:
            following = chunk.request.prompt[chunk.start + 1 : chunk.start + len(chunk.tokens) + 1]
            partition, start = divmod(place.start, bucket)
            fields["targets"][partition, start : start + len(following)] = following
        write_tiles(fields, [place for _, place in places], self._shapes.score_tile(bucket))
        return packed, tuple(place for _, place in places)

    def _num_padded(self, chunks: Sequence[PrefillChunk]) -> int:
        """A single row may be shorter than others."""
        num_rows = sum(map(self._num_rows, chunks))
        return len(chunks[0].tokens) if num_rows == 1 else num_rows * self._shapes.q_tile

    def _num_rows(self, chunk: PrefillChunk) -> int:
        return -(-len(chunk.tokens) // self._shapes.q_tile)

    def _write_chunks(self, fields: Fields, chunks: Sequence[PrefillChunk]) -> list[SequenceId]:
        """One partition's chunks, row after row. Returns the sequences that draw, in the order of their draws."""
        tile, drawing, row = self._shapes.q_tile, list[SequenceId](), 0
        for chunk in chunks:
            self._write_chunk(fields, chunk, row)
            end = row * tile + len(chunk.tokens) - 1
            for sequence, slot in chunk.samples:
                draw = len(drawing)
                fields["sample_from"][draw] = end
                fields["sample_slot"][draw] = slot.index
                _write_sampling(fields, draw, chunk.request, sequence.choice)
                fields["sample_position"][draw] = chunk.start + len(chunk.tokens)
                drawing.append(sequence)
            row += self._num_rows(chunk)
        fields["num_rows"][...] = len(drawing)
        return drawing

    def _write_chunk(self, fields: Fields, chunk: PrefillChunk, first_row: int) -> None:
        count, begin = len(chunk.tokens), first_row * self._shapes.q_tile
        fields["tokens"].reshape(-1)[begin : begin + count] = chunk.tokens
        fields["positions"].reshape(-1)[begin : begin + count] = np.arange(chunk.start, chunk.start + count)
        rows = slice(first_row, first_row + self._num_rows(chunk))
        self._write_table(fields["block_tables"][rows], chunk.block_table)

    def _write_table(self, rows: np.ndarray, blocks: tuple[int, ...]) -> None:
        """Writes a sequence's blocks into [..., groups, columns], each under all columns that it is for."""
        if not self._places:
            rows[..., 0, : len(blocks)] = blocks
            return
        found = np.asarray(blocks, np.int32)
        for group, places in enumerate(self._places):
            is_there = places < len(blocks)
            rows[..., group, is_there] = found[places[is_there]]

    def _encode_decode(self, plan: DecodePlan) -> Step:
        by_partition = self._by_partition(plan.rows)
        kind = StepKind.VERIFY if plan.has_guesses else StepKind.DECODE
        num_ahead = min(plan.num_ahead, self._shapes.num_ahead)
        bucket = self._bucket_for(kind, max(map(len, by_partition)))
        packed, fields = self._decodes[kind, bucket]  # of the last step of this size: every row of it is written again
        for partition, rows in enumerate(by_partition):
            self._write_rows(partition, rows)
            own = self._rows[partition]
            for name, field in fields.items():
                field[partition] = own[name][:bucket]
        num_drawn = self._layouts[_DECODES[kind], 0].size  # words: the fields of plain draws come first
        has_model = self._shapes.num_ahead > 0
        guessing = self._guesses_after_decode(kind, bucket, num_ahead, by_partition) if has_model else None
        return Step(
            plan.number,
            kind,
            bucket,
            packed.copy(),
            sampling=self._drawn[:, :num_drawn].copy(),
            guessing=guessing,
            num_ahead=num_ahead,
            draws=self._draws_of(plan),
        )

    def _guesses_after_decode(
        self, kind: StepKind, bucket: int, num_ahead: int, by_partition: list[list[DecodeRow]]
    ) -> np.ndarray:
        """The packed guesses behind a decode step."""
        packed, fields = self._blank(GUESS_AFTER[kind], bucket)
        fields["num_ahead"][...] = num_ahead
        for partition, rows in enumerate(by_partition):
            fields["num_blocks"][partition, : len(rows)] = [len(row.block_table) for row in rows]
        return packed

    def _draws_of(self, plan: DecodePlan) -> tuple[int, ...]:
        """The row of the draws of each of the plan's rows."""
        if self._shapes.num_partitions == 1:
            return tuple(range(len(plan.rows)))
        per_partition = self._shapes.slots_per_partition
        ends = [
            itertools.count(start) for start in range(0, self._shapes.num_partitions * per_partition, per_partition)
        ]
        return tuple(next(ends[row.slot.partition]) for row in plan.rows)

    def _write_rows(self, partition: int, rows: Sequence[DecodeRow]) -> None:
        """Writes one partition's rows: positions and guesses of all, and what has changed of the rest."""
        fields, written, count = self._rows[partition], self._written[partition], len(rows)
        positions = np.array([row.position for row in rows], np.int32)
        fields["positions"][:count] = positions
        fields["sample_position"][:count] = positions + 1
        for index, row in enumerate(rows):
            found = written[index]
            if found is None or not (
                found.sequence is row.sequence and found.block_table is row.block_table and found.slot is row.slot
            ):
                self._write_row(partition, index, row)
            if self._shapes.q_len > 1:
                _write_guesses(fields, index, row)
        for index in range(count, self._num_written[partition]):  # the draws' array goes out whole
            self._clear_row(partition, index)
        self._num_written[partition] = count
        fields["num_rows"][...] = count

    def _write_row(self, partition: int, index: int, row: DecodeRow) -> None:
        """What stays from step to step: all but the positions and the guesses."""
        fields, written = self._rows[partition], self._written[partition][index]
        if written is None or written.sequence is not row.sequence:
            _write_sampling(fields, index, row.request, row.sequence.choice)
        if written is None or written.block_table is not row.block_table:
            self._write_table(fields["block_tables"][index], row.block_table)
        # preempted, a sequence may come back to its row in another slot
        fields["slot"][index] = fields["sample_slot"][index] = row.slot.index
        self._written[partition][index] = _Written(row.sequence, row.block_table, row.slot)

    def _clear_row(self, partition: int, index: int) -> None:
        for name, field in self._rows[partition].items():
            if field.ndim:  # a value of the whole step is no row's
                field[index] = self._blank_rows[name][0, index]
        self._written[partition][index] = None

    def _encode_load(self, plan: LoadPlan) -> Step:
        packed, fields = self._blank(StepKind.LOAD)
        fields = _of(fields, plan.slot.partition)
        request, bias = plan.request, plan.request.sampling.logit_bias
        fields["slot"][...] = plan.slot.index
        fields["num_prompt"][...] = plan.num_prompt
        fields["num_history"][...] = len(plan.history)
        fields["history"][: len(plan.history)] = plan.history
        fields["bias_ids"][: len(bias)] = list(bias.keys())
        fields["bias_values"][: len(bias)] = list(bias.values())
        fields["stop_ids"][: len(request.stop_token_ids)] = sorted(request.stop_token_ids)
        return Step(plan.number, StepKind.LOAD, 0, packed)

    def _encode_copy(self, plan: CopyPlan) -> Step:
        packed, fields = self._blank(StepKind.COPY)
        indices = [itertools.count() for _ in range(self._shapes.num_partitions)]
        for partition, source, destination in plan.pairs:
            index = next(indices[partition])
            fields["source"][partition, index] = source
            fields["destination"][partition, index] = destination
        return Step(plan.number, StepKind.COPY, 0, packed)

    def encode_export(self, number: int, partition: int, blocks: Sequence[int], ticket: int | None = None) -> Step:
        """Read blocks of one partition, at most as many as the largest transfer bucket."""
        bucket = self._bucket_for(StepKind.EXPORT, len(blocks))
        packed, fields = self._blank(StepKind.EXPORT, bucket)
        fields["source"][partition, : len(blocks)] = blocks
        num_blocks = len(blocks)
        return Step(number, StepKind.EXPORT, bucket, packed, partition=partition, num_blocks=num_blocks, ticket=ticket)

    def encode_land(
        self, number: int, partition: int, blocks: Sequence[int], payload: np.ndarray, ticket: int | None = None
    ) -> Step:
        """Overwrite blocks of one partition with `payload` [len(blocks), ...].

        The payload is copied only where the bucket has more room than it has blocks.
        """
        bucket = self._bucket_for(StepKind.LAND, len(blocks))
        packed, fields = self._blank(StepKind.LAND, bucket)
        fields["destination"][partition, : len(blocks)] = blocks
        return Step(
            number,
            StepKind.LAND,
            bucket,
            packed,
            partition=partition,
            num_blocks=len(blocks),
            payload=padded(payload, bucket),
            ticket=ticket,
        )

    def _blank(self, kind: StepKind, bucket: int = 0) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        return self._layouts[kind, bucket].blank(self._shapes.num_partitions)

    def _by_partition[T: PrefillChunk | DecodeRow](self, parts: Sequence[T]) -> list[list[T]]:
        found: list[list[T]] = [[] for _ in range(self._shapes.num_partitions)]
        for part in parts:
            found[part.slot.partition].append(part)
        return found


def padded(payload: np.ndarray, bucket: int) -> np.ndarray:
    """Blocks [b, layers, block_size, features] as the land of a bucket takes them. A copy where it has more room."""
    if bucket == len(payload):
        return payload
    found = np.zeros((bucket, *payload.shape[1:]), payload.dtype)
    found[: len(payload)] = payload
    return found


def _places(shapes: StepShapes) -> tuple[np.ndarray, ...]:
    """Of each group, where the block of each column stands among those of the sequence."""
    groups, columns = shapes.groups, range(shapes.columns_per_sequence)
    return tuple(np.array([groups.place(group, column) for column in columns]) for group in range(len(groups)))


def _of(fields: Fields, partition: int) -> dict[str, np.ndarray]:
    return {name: field[partition, ...] for name, field in fields.items()}


def _write_sampling(fields: Fields, row: int, request: Request, choice: int) -> None:
    sampling = request.sampling
    for parameter in PARAMETERS:
        value = getattr(sampling, parameter.name)
        fields[parameter.name][row] = (value >> 32, value & 0xFFFFFFFF) if parameter.is_wide else value
    fields["choice"][row] = choice
    fields["has_bias"][row] = bool(sampling.logit_bias)
    fields["stops_from"][row] = len(request.prompt) + request.min_tokens if request.stop_token_ids else 0
    fields["wants_logprobs"][row] = request.num_logprobs is not None
    fields["is_masked"][row] = bool(request.grammar)


def _write_guesses(fields: Fields, index: int, row: DecodeRow) -> None:
    """Behind a row's own guesses what stands there does not matter."""
    fields["q_len"][index] = fields["sample_q_len"][index] = row.q_len
    num_guesses = len(row.draft)
    fields["draft"][index, :num_guesses] = fields["sample_draft"][index, :num_guesses] = row.draft
