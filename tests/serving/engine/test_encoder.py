"""Plans become rows: every number lands in its field, and a row holds nothing of whoever had it before."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.serving.control.plan import CopyPlan, DecodePlan, DecodeRow, LoadPlan, PrefillChunk, PrefillPlan
from moonshard.serving.control.request import MAX_LOGIT_BIAS, MAX_STOP_TOKENS, Request, SequenceId, SlotId
from moonshard.serving.control.sampling_parameters import Sampling
from moonshard.serving.engine.encoder import StepEncoder
from moonshard.serving.engine.steps import NOWHERE, Step, StepKind, StepShapes

TILE, SLOTS = 4, 4
SHAPES = StepShapes(
    num_partitions=2,
    slots_per_partition=SLOTS,
    columns_per_sequence=6,
    max_context_tokens=40,
    q_tile=TILE,
    prefill_buckets=(4, 8, 16),
    decode_buckets=(1, 2, 4),
    transfer_buckets=(1, 2, 4),
)
EVERYTHING = Sampling(
    temperature=0.75,
    top_p=0.5,
    top_k=7,
    min_p=0.25,
    repetition_penalty=1.5,
    presence_penalty=-0.5,
    frequency_penalty=0.125,
    logit_bias={3: 1.5, 9: -100.0},
    seed=0xFEDCBA9876543210,
)
ASKED = {
    "temperature": 0.75,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.125,
    "seed": [0xFEDCBA98, 0x76543210],
    "has_bias": 1,
    "wants_logprobs": 1,
}
NEUTRAL = {
    "temperature": 0,
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "has_bias": 0,
    "stops_from": 0,
    "wants_logprobs": 0,
}


@pytest.fixture
def encoder() -> StepEncoder:
    return StepEncoder(SHAPES)


def request(number: int = 0, prompt=(1, 2, 3), sampling: Sampling = EVERYTHING, **options) -> Request:
    return Request(id=number.to_bytes(16), prompt=tuple(prompt), max_tokens=9, sampling=sampling, **options)


def fields_of(step: Step) -> dict[str, np.ndarray]:
    """The encoded fields, each [partitions, ...], those of the draws included."""
    packed, views = SHAPES.layout(step.kind, step.bucket).blank(SHAPES.num_partitions)
    packed[...] = step.metadata
    drawn, draws = SHAPES.layout(StepKind.DRAW).blank(SHAPES.num_partitions)
    if step.sampling is not None:
        drawn[...] = step.sampling
    return views | draws


def values(fields: dict[str, np.ndarray], names, row: int, partition: int = 0) -> dict[str, object]:
    return {name: fields[name][partition, row].tolist() for name in names}


def decode(encoder: StepEncoder, *rows: DecodeRow) -> dict[str, np.ndarray]:
    return fields_of(encoder.encode(DecodePlan(number=5, rows=rows)))


def row(of: Request, slot: SlotId, position: int = 3, table=(4, 2), choice: int = 0) -> DecodeRow:
    return DecodeRow(
        sequence=SequenceId(of.id, choice), request=of, slot=slot, position=position, block_table=tuple(table)
    )


def chunk(of: Request, slot: SlotId, start: int, tokens, table, samples=()) -> PrefillChunk:
    return PrefillChunk(
        sequence=SequenceId(of.id, 0),
        request=of,
        slot=slot,
        start=start,
        tokens=tuple(tokens),
        block_table=tuple(table),
        samples=tuple((SequenceId(of.id, choice), slot) for choice, slot in samples),
    )


def assert_empty(fields: dict[str, np.ndarray], row: int, partition: int = 0) -> None:
    assert values(fields, NEUTRAL, row, partition) == NEUTRAL
    assert fields["num_rows"][partition] <= row
    assert fields["sample_slot"][partition, row] == SLOTS
    assert (fields["slot"][partition, row], fields["positions"][partition, row]) == (SLOTS, -1)


def test_a_decode_row_carries_its_slot_position_blocks_and_sampling(encoder):
    asked = request(num_logprobs=0)
    rows = [row(asked, SlotId(1, 2), position=7, table=(4, 2), choice=3), *(row(asked, SlotId(1, n)) for n in range(2))]
    fields = decode(encoder, *rows)
    assert values(fields, ASKED, 0, partition=1) == ASKED
    assert fields["slot"].tolist() == [[SLOTS] * 4, [2, 0, 1, SLOTS]]
    assert fields["positions"].tolist() == [[-1] * 4, [7, 3, 3, -1]]
    assert fields["sample_position"][1, 0] == 8
    assert fields["choice"][1, 0] == 3
    assert fields["block_tables"][1, 0, 0, :2].tolist() == [4, 2]
    assert_empty(fields, 3, partition=1)


@pytest.mark.parametrize(("num_rows", "bucket"), [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 4), (6, 4), (8, 4)])
def test_a_decode_step_takes_the_smallest_bucket_that_holds_each_partition_s_rows(encoder, num_rows, bucket):
    rows = tuple(row(request(n), SlotId(n % 2, n // 2)) for n in range(num_rows))
    step = encoder.encode(DecodePlan(number=0, rows=rows))
    assert step.bucket == bucket
    assert step.draws == tuple(n % 2 * SLOTS + n // 2 for n in range(num_rows))
    assert fields_of(step)["num_rows"].tolist() == [-(-num_rows // 2), num_rows // 2]
    for partition in range(2):
        for padding in range(-(-(num_rows - partition) // 2), bucket):
            assert_empty(fields_of(step), padding, partition)


@pytest.mark.parametrize(("lengths", "bucket"), [((1,), 1), ((2,), 2), ((3,), 4), ((5,), 8), ((1, 1), 8)])
def test_a_few_tokens_of_one_sequence_take_a_row_that_is_shorter_than_others(lengths, bucket):
    """Each partition has such a row; several sequences have whole rows."""
    shapes = replace(SHAPES, prefill_buckets=(1, 2, 4, 8, 16))
    slots = [SlotId(1, index) for index in range(len(lengths))]
    chunks = [
        chunk(request(n), slot, 6, range(9, 9 + length), [4, 2, 3], ((0, slot),))
        for n, (slot, length) in enumerate(zip(slots, lengths, strict=True))
    ]
    step = StepEncoder(shapes).encode(PrefillPlan(number=0, chunks=tuple(chunks)))
    assert step.bucket == bucket
    fields = shapes.layout(StepKind.PREFILL, bucket).views(step.metadata)
    tile = min(TILE, bucket)
    assert fields["tokens"].shape == (2, bucket // tile, tile)
    assert (fields["positions"][0] == -1).all()
    for row, length in enumerate(lengths):
        flat, begin = fields["positions"][1].reshape(-1), row * tile
        assert flat[begin : begin + length].tolist() == list(range(6, 6 + length))
        assert (flat[begin + length : begin + tile] == -1).all()
        assert fields["block_tables"][1, row, 0, :3].tolist() == [4, 2, 3]
        assert fields["sample_from"][1, row] == begin + length - 1


def test_rows_say_how_many_positions_they_have_where_these_can_be_several():
    shapes = replace(SHAPES, q_len=4)
    rows = tuple(
        row(request(), SlotId(0, n))._replace(q_len=1 + len(draft), draft=draft)
        for n, draft in enumerate([(7, 8, 9), ()])
    )
    step = StepEncoder(shapes).encode(DecodePlan(number=0, rows=rows))
    fields = shapes.layout(step.kind, step.bucket).views(step.metadata)
    assert (step.kind, fields["q_len"].tolist()) == (StepKind.VERIFY, [[4, 1], [1, 1]])
    assert fields["draft"][0, 0].tolist() == [7, 8, 9]
    assert step.sampling is not None
    draws = shapes.layout(StepKind.ACCEPT).views(step.sampling)
    assert (draws["sample_q_len"][0, :2].tolist(), draws["sample_draft"][0, 0].tolist()) == ([4, 1], [7, 8, 9])


def test_a_step_without_guesses_is_that_of_a_worker_that_never_guesses():
    rows = (row(request(), SlotId(0, 1)), row(request(1), SlotId(1, 0)))
    plan = DecodePlan(number=0, rows=rows)
    guessing = StepEncoder(replace(SHAPES, q_len=4))
    guessing.encode(DecodePlan(number=0, rows=(rows[0]._replace(q_len=3, draft=(5, 6)), rows[1])))
    ours, theirs = guessing.encode(plan), StepEncoder(SHAPES).encode(plan)
    assert (ours.kind, ours.bucket, ours.draws) == (theirs.kind, theirs.bucket, theirs.draws)
    np.testing.assert_array_equal(ours.metadata, theirs.metadata)
    np.testing.assert_array_equal(ours.sampling, theirs.sampling)


def test_rows_of_requests_with_a_grammar_are_masked_and_others_are_not(encoder):
    rows = (row(request(0, grammar="start: /a/"), SlotId(0, 0)), row(request(1), SlotId(0, 1)))
    assert decode(encoder, *rows)["is_masked"][0, :2].tolist() == [1, 0]
    assert decode(encoder, rows[1])["is_masked"][0, :2].tolist() == [0, 0]


def test_partitions_keep_their_slots_and_blocks_apart(encoder):
    fields = decode(encoder, row(request(1), SlotId(0, 1), table=(9,)), row(request(2), SlotId(1, 1), table=(8,)))
    assert fields["slot"].tolist() == [[1], [1]]
    assert fields["block_tables"][:, 0, 0, 0].tolist() == [9, 8]


def test_a_row_that_left_is_neutral_again_and_those_after_it_move_up(encoder):
    asked = request(num_logprobs=2, min_tokens=5, stop_token_ids=frozenset({8}))
    rows = [row(asked, SlotId(0, n), choice=n, table=(n, n + 7)) for n in range(3)]
    decode(encoder, *rows)
    fields = decode(encoder, rows[0], rows[2])
    assert (
        fields["slot"][0].tolist()
        == fields["choice"][0, :2].tolist()
        == fields["sample_slot"][0, :2].tolist()
        == [0, 2]
    )
    assert fields["num_rows"][0] == 2
    assert fields["block_tables"][0, :, 0, :2].tolist() == [[0, 7], [2, 9]]
    back = decode(encoder, *rows, row(asked, SlotId(0, 3), choice=3))
    assert back["slot"][0].tolist() == [0, 1, 2, 3]
    assert values(back, ASKED, 3) == ASKED
    fewer = decode(encoder, *rows)
    assert values(fewer, ASKED, 2) == ASKED
    assert_empty(fewer, 3)


def test_a_smaller_step_of_others_draws_for_nobody_of_the_one_before(encoder):
    """A pipeline's microbatches take turns: what is drawn for one must not hold up another."""
    asked = request(num_logprobs=2)
    decode(encoder, *(row(asked, SlotId(0, n), choice=n) for n in range(3)))
    fields = decode(encoder, row(request(5), SlotId(0, 3)))
    assert fields["sample_slot"][0].tolist() == [3, SLOTS, SLOTS, SLOTS]
    for index in (1, 2, 3):
        assert values(fields, NEUTRAL, index) == NEUTRAL


def test_a_new_owner_of_a_row_brings_its_own_sampling_and_blocks(encoder):
    slot = SlotId(0, 0)
    before = row(request(1, num_logprobs=1), slot)
    decode(encoder, before)
    plain = Sampling(temperature=0.0, seed=1)
    fields = decode(encoder, row(request(2, sampling=plain), slot, position=20, table=(30, 31)))
    assert values(fields, NEUTRAL, 0) == NEUTRAL
    assert fields["seed"][0, 0].tolist() == [0, 1]
    assert fields["block_tables"][0, 0, 0, :2].tolist() == [30, 31]
    assert (fields["positions"][0, 0], fields["sample_position"][0, 0]) == (20, 21)
    assert decode(encoder, row(request(2, sampling=plain), slot, choice=1))["choice"][0, 0] == 1
    back = decode(encoder, before)
    assert values(back, ASKED, 0) == ASKED
    assert back["block_tables"][0, 0, 0, :2].tolist() == [4, 2]


def test_an_id_used_again_brings_the_sampling_of_its_new_request(encoder):
    decode(encoder, row(request(7), SlotId(0, 0)))
    fields = decode(encoder, row(request(7, sampling=Sampling(temperature=0.25)), SlotId(0, 0)))
    assert values(fields, NEUTRAL, 0) == NEUTRAL | {"temperature": 0.25}


def test_a_sequence_that_comes_back_to_its_row_in_another_slot_is_read_from_there(encoder):
    first, back = request(1), request(2)
    decode(encoder, row(first, SlotId(0, 0)), row(back, SlotId(0, 1)))
    decode(encoder, row(first, SlotId(0, 0)))
    fields = decode(encoder, row(first, SlotId(0, 0)), row(back, SlotId(0, 2), table=(8,)))
    assert fields["slot"][0].tolist() == fields["sample_slot"][0, :2].tolist() == [0, 2]
    assert fields["block_tables"][0, 1, 0, 0] == 8


def test_a_table_that_grew_is_written_again(encoder):
    asked, slot = request(), SlotId(1, 0)
    decode(encoder, row(asked, slot, table=(4, 2)))
    fields = decode(encoder, row(asked, slot, position=4, table=(4, 2, 17)))
    assert fields["block_tables"][1, 0, 0, :3].tolist() == [4, 2, 17]


def test_a_step_in_flight_is_not_changed_by_the_next(encoder):
    first = encoder.encode(DecodePlan(number=0, rows=(row(request(), SlotId(0, 0)),)))
    assert first.sampling is not None
    before, sampling = first.metadata.copy(), first.sampling.copy()
    encoder.encode(DecodePlan(number=1, rows=(row(request(), SlotId(0, 0), position=4),)))
    np.testing.assert_array_equal(first.metadata, before)
    np.testing.assert_array_equal(first.sampling, sampling)


@pytest.mark.parametrize(
    ("position", "min_tokens", "stops", "is_banned"),
    [(2, 2, {8}, True), (3, 2, {8}, True), (4, 2, {8}, False), (2, 0, {8}, False), (2, 2, set(), False)],
)
def test_stop_tokens_are_banned_until_min_tokens_are_drawn(encoder, position, min_tokens, stops, is_banned):
    asked = request(min_tokens=min_tokens, stop_token_ids=frozenset(stops))  # a prompt of 3: position 2 draws the first
    fields = decode(encoder, row(asked, SlotId(0, 0), position=position))
    assert (fields["sample_position"][0, 0] < fields["stops_from"][0, 0]) == is_banned


def test_prefill_chunks_fill_whole_tiles_of_one_sequence_each(encoder):
    first, second, third = request(1, range(10, 19)), request(2, range(50, 53), num_logprobs=1), request(3)
    plan = PrefillPlan(
        number=8,
        chunks=(
            chunk(first, SlotId(0, 0), 3, range(13, 19), (7, 8, 9), samples=((0, SlotId(0, 0)), (1, SlotId(0, 2)))),
            chunk(third, SlotId(1, 3), 0, (1, 2, 3), (6,), samples=((0, SlotId(1, 3)),)),
            chunk(second, SlotId(0, 1), 0, (50, 51), (5,)),
        ),
    )
    step = encoder.encode(plan)
    fields = fields_of(step)
    assert (step.number, step.kind, step.bucket) == (8, StepKind.PREFILL, 16)
    assert fields["tokens"][0, :3].tolist() == [[13, 14, 15, 16], [17, 18, 0, 0], [50, 51, 0, 0]]
    assert fields["tokens"][1, 0].tolist() == [1, 2, 3, 0]
    assert fields["positions"][0].tolist() == [[3, 4, 5, 6], [7, 8, -1, -1], [0, 1, -1, -1], [-1] * 4]
    assert fields["positions"][1].tolist() == [[0, 1, 2, -1], *[[-1] * 4] * 3]
    assert fields["block_tables"][0, :2, 0, :3].tolist() == [[7, 8, 9]] * 2
    assert (fields["block_tables"][0, 2, 0, 0], fields["block_tables"][1, 0, 0, 0]) == (5, 6)
    assert fields["sample_slot"].tolist() == [[0, 2, SLOTS, SLOTS], [3, SLOTS, SLOTS, SLOTS]]
    assert fields["sample_from"][:, :2].tolist() == [[5, 5], [2, 0]]
    assert fields["sample_position"][:, 0].tolist() == [9, 3]
    assert fields["choice"][0, :2].tolist() == [0, 1]
    assert fields["num_rows"].tolist() == [2, 1]
    assert values(fields, NEUTRAL, 2) == NEUTRAL
    assert step.draws == (0, 1, SLOTS)


def test_each_sequence_of_a_prefill_draws_from_its_own_last_token(encoder):
    chunks = tuple(
        chunk(request(n, range(n + 1)), SlotId(0, n), 0, range(n + 1), (n,), samples=((0, SlotId(0, n)),))
        for n in range(3)
    )
    fields = fields_of(encoder.encode(PrefillPlan(number=0, chunks=chunks)))
    assert fields["sample_from"][0, :3].tolist() == [0, TILE + 1, 2 * TILE + 2]
    assert fields["sample_slot"][0, :3].tolist() == [0, 1, 2]
    assert fields["sample_position"][0, :3].tolist() == [1, 2, 3]


@pytest.mark.parametrize(("num_tokens", "bucket"), [(1, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16)])
def test_a_prefill_takes_the_smallest_bucket(encoder, num_tokens, bucket):
    plan = PrefillPlan(number=0, chunks=(chunk(request(), SlotId(0, 0), 0, range(num_tokens), (1, 2, 3, 4)),))
    step = encoder.encode(plan)
    assert step.bucket == bucket
    assert step.metadata.shape == (2, SHAPES.layout(StepKind.PREFILL, bucket).size)


def test_a_prefill_that_ends_no_prompt_draws_nothing(encoder):
    step = encoder.encode(PrefillPlan(number=0, chunks=(chunk(request(), SlotId(0, 0), 0, range(4), (1,)),)))
    assert (step.sampling, step.draws) == (None, ())


def test_a_step_takes_the_smallest_bucket_that_is_there():
    def there(kind: StepKind, size: int) -> int:
        assert kind is StepKind.DECODE
        return 4 if size <= 4 else 0

    step = StepEncoder(SHAPES, there).encode(DecodePlan(number=0, rows=(row(request(), SlotId(0, 0)),)))
    assert step.bucket == 4
    assert fields_of(step)["slot"][0].tolist() == [0, *[SLOTS] * 3]


def test_a_load_carries_history_bias_and_stops_and_marks_the_rest_unused(encoder):
    asked = request(prompt=(1, 2, 3), stop_token_ids=frozenset({40, 8}))
    plan = LoadPlan(
        number=2, sequence=SequenceId(asked.id, 0), request=asked, slot=SlotId(1, 2), history=(1, 2, 3, 60, 61)
    )
    fields = fields_of(encoder.encode(plan))
    assert fields["slot"].tolist() == [SLOTS, 2]
    assert (fields["num_prompt"][1], fields["num_history"][1]) == (3, 5)
    assert fields["history"][1, :5].tolist() == [1, 2, 3, 60, 61]
    assert fields["bias_ids"][1].tolist() == [3, 9] + [NOWHERE] * (MAX_LOGIT_BIAS - 2)
    assert fields["bias_values"][1, :2].tolist() == [1.5, -100.0]
    assert fields["stop_ids"][1].tolist() == [8, 40] + [NOWHERE] * (MAX_STOP_TOKENS - 2)


def test_copies_stay_within_a_partition_and_the_rest_goes_nowhere(encoder):
    fields = fields_of(encoder.encode(CopyPlan(number=3, pairs=((0, 4, 6), (1, 4, 7), (0, 5, 8)))))
    assert fields["source"][:, :2].tolist() == [[4, 5], [4, 0]]
    assert fields["destination"].tolist() == [[6, 8, NOWHERE, NOWHERE], [7] + [NOWHERE] * 3]


def payload_of(num_blocks: int) -> np.ndarray:
    return np.arange(num_blocks * 6, dtype=np.float32).reshape(num_blocks, 1, 2, 3) + 1


@pytest.mark.parametrize(("num_blocks", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4)])
def test_an_export_names_a_partition_s_blocks_in_the_smallest_bucket(encoder, num_blocks, bucket):
    blocks = (9, 4, 30, 2)[:num_blocks]
    step = encoder.encode_export(-5, 1, blocks)
    assert (step.number, step.kind, step.bucket, step.payload) == (-5, StepKind.EXPORT, bucket, None)
    assert step.partition == 1
    assert fields_of(step)["source"][1, :num_blocks].tolist() == list(blocks)


def test_a_land_that_fills_its_bucket_takes_the_payload_where_it_lies(encoder):
    payload = payload_of(2)
    step = encoder.encode_land(-7, 1, (8, 3), payload)
    assert (step.number, step.kind, step.bucket) == (-7, StepKind.LAND, 2)
    assert fields_of(step)["destination"].tolist() == [[NOWHERE, NOWHERE], [8, 3]]
    assert step.partition == 1
    assert step.payload is payload


def test_a_land_in_a_larger_bucket_is_padded_with_blocks_that_go_nowhere(encoder):
    payload = payload_of(3)
    step = encoder.encode_land(-2, 0, (8, 3, 5), payload)
    assert fields_of(step)["destination"][0].tolist() == [8, 3, 5, NOWHERE]
    assert step.payload.shape == (4, 1, 2, 3)
    np.testing.assert_array_equal(step.payload[:3], payload)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[DecodeRow, ...]]:
    """The rows of decode steps one after another: sequences go on, leave, come back in other slots, and grow."""
    plain = Sampling(temperature=0.0)
    asked = [
        request(n, sampling=plain if n % 2 else EVERYTHING, min_tokens=3 * (n % 3), stop_token_ids=frozenset({8}))
        for n in range(6)
    ]
    ids, positions = [SequenceId(each.id, 0) for each in asked], [3] * len(asked)
    tables: list[tuple[int, ...]] = [(10 * n,) for n in range(len(asked))]
    slots = dict[int, SlotId]()
    steps: list[tuple[DecodeRow, ...]] = []
    for _ in range(draw(st.integers(1, 6))):
        chosen = draw(st.lists(st.sampled_from(range(len(asked))), unique=True, max_size=SLOTS))
        for number in chosen:
            if number not in slots or draw(st.booleans()):
                slots[number] = SlotId(draw(st.integers(0, 1)), draw(st.integers(0, SLOTS - 1)))
            if draw(st.booleans()):
                tables[number] = (*tables[number][:3], tables[number][-1] + 1)
        steps.append(
            tuple(
                DecodeRow(ids[number], asked[number], slots[number], positions[number], tables[number])
                for number in chosen
            )
        )
        for number in chosen:
            positions[number] += 1
    return steps


@given(histories())
def test_a_step_is_the_same_whatever_was_encoded_before_it(history: list[tuple[DecodeRow, ...]]):
    """But for the columns of block tables behind a sequence's own, which nobody reads."""
    lasting = StepEncoder(SHAPES)
    for rows in history:
        plan = DecodePlan(number=1, rows=rows)
        step, fresh = lasting.encode(plan), StepEncoder(SHAPES).encode(plan)
        assert (step.bucket, step.draws) == (fresh.bucket, fresh.draws)
        found, wanted = fields_of(step), fields_of(fresh)
        for draw, row in zip(step.draws, rows, strict=True):
            own = (*divmod(draw, SLOTS), 0, slice(len(row.block_table)))
            np.testing.assert_array_equal(found["block_tables"][own], wanted["block_tables"][own])
        for name in wanted.keys() - {"block_tables"}:
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
