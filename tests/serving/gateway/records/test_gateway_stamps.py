"""Durations of requests that move or go on elsewhere, from stamps that a test chooses."""

import pytest

from moonshard.rpc import link_pb2
from moonshard.serving.gateway.records.stamps import Stamps

MS = 1_000_000


def output(choice: int = 0, **phases_ms: float) -> link_pb2.SequenceOutput:
    phases = link_pb2.WorkerPhases(**phases_ms) if phases_ms else None
    return link_pb2.SequenceOutput(choice=choice, token_ids=[1], phases=phases)


def stamps() -> Stamps:
    made = Stamps(received_ns=0, first_delivered_ns=9 * MS)
    made.sent(1 * MS)
    return made


def test_the_gap_is_between_the_first_two_outputs_of_the_first_choice():
    moved = stamps()
    for at_ms, choice in ((4, 0), (5, 1), (6, 1), (10, 0), (30, 0)):
        moved.arrived(at_ms * MS, output(choice))
    moved.transfer = link_pb2.TransferPhases(transfer_ms=3, exposed_ms=1)
    timing = moved.timing()
    assert (timing.handoff_gap_ms, timing.transfer_ms, timing.exposed_transfer_ms) == (6, 3, 1)


def test_a_request_that_did_not_move_has_no_gap():
    stayed = stamps()
    stayed.arrived(4 * MS, output())
    stayed.arrived(10 * MS, output())
    assert stayed.timing().handoff_gap_ms == 0


def test_the_decode_workers_phases_leave_the_prefill_workers_alone():
    moved = stamps()
    moved.arrived(4 * MS, output(queue_ms=1, prefill_ms=2))
    moved.arrived(8 * MS, output(land_ms=0.5, join_ms=0.25))
    moved.arrived(9 * MS, output(decode_ms=4))
    moved.transfer = link_pb2.TransferPhases()
    timing = moved.timing()
    assert (timing.worker_queue_ms, timing.worker_prefill_ms, timing.worker_decode_ms) == (1, 2, 4)
    assert (timing.land_ms, timing.join_ms, timing.wire_ms) == (0.5, 0.25, 0)


def test_what_another_worker_did_before_it_went_on_is_no_part_of_the_first_tokens_time():
    lost = stamps()
    lost.arrived(4 * MS, output(queue_ms=1, prefill_ms=2))
    lost.retried()
    lost.arrived(90 * MS, output(queue_ms=30, prefill_ms=40, decode_ms=5))
    timing = lost.timing()
    assert (timing.worker_queue_ms, timing.worker_prefill_ms, timing.worker_decode_ms) == (1, 2, 5)
    assert (timing.wire_ms, timing.num_retries) == (0, 1)


def test_a_choice_that_waited_for_a_slot_of_its_own_is_no_part_of_the_first_tokens_time():
    both = stamps()
    both.arrived(4 * MS, output(queue_ms=1, prefill_ms=2))
    both.arrived(90 * MS, output(1, queue_ms=1, prefill_ms=88))
    timing = both.timing()
    assert (timing.worker_queue_ms, timing.worker_prefill_ms, timing.wire_ms) == (1, 2, 0)


def test_a_request_begun_anew_before_its_first_token_has_the_phases_of_the_worker_that_gave_it():
    lost = stamps()
    lost.reserved(7)
    lost.retried()
    lost.sent(20 * MS)
    lost.arrived(91 * MS, output(queue_ms=30, prefill_ms=40))
    timing = lost.timing()
    assert (timing.worker_queue_ms, timing.worker_prefill_ms) == (30, 40)
    assert timing.first_token_ms == pytest.approx(90)
    assert (timing.lost_ms, timing.decode_queue_ms, timing.wire_ms) == (19, 0, 1)


def test_the_wait_for_room_at_the_decode_worker_is_no_wire():
    moved = stamps()
    moved.reserved(50)
    moved.arrived(64 * MS, output(queue_ms=4, prefill_ms=8))
    timing = moved.timing()
    assert (timing.decode_queue_ms, timing.lost_ms, timing.wire_ms) == (50, 0, 1)


def test_an_attempt_that_goes_on_behind_the_first_token_changes_nothing_before_it():
    moved = stamps()
    moved.reserved(1)
    moved.arrived(4 * MS, output(queue_ms=1, prefill_ms=1))
    moved.sent(50 * MS)
    moved.arrived(60 * MS, output())
    timing = moved.timing()
    assert (timing.decode_queue_ms, timing.lost_ms, timing.wire_ms, timing.first_token_ms) == (1, 0, 0, 3)


def test_the_time_of_a_request_is_measured_and_not_made_of_its_phases():
    ended = stamps()
    ended.arrived(4 * MS, output())
    ended.ended_ns = 10 * MS
    assert ended.e2e_ns == 10 * MS
    assert ended.phases_ns(is_complete=True) == (1 * MS, 3 * MS, 0, 6 * MS)
    assert ended.phases_ns(is_complete=False) == (1 * MS, 3 * MS, 6 * MS, 0)
    ended.end()
    assert ended.e2e_ns == 10 * MS  # it ends once


def test_kv_that_moved_in_vain_is_no_part_of_the_attempt_that_gave_the_first_token():
    lost = stamps()
    lost.transfer, lost.transferred_ns = link_pb2.TransferPhases(transfer_ms=3), 5 * MS
    lost.retried()
    lost.sent(20 * MS)
    lost.arrived(30 * MS, output(queue_ms=1, prefill_ms=2))
    assert (lost.transfer, lost.transferred_ns, lost.timing().transfer_ms) == (None, 0, 0)
    moved = stamps()
    moved.arrived(4 * MS, output())
    moved.transfer, moved.transferred_ns = link_pb2.TransferPhases(transfer_ms=3), 5 * MS
    moved.sent(20 * MS)  # goes on behind the first token
    assert (moved.timing().transfer_ms, moved.transferred_ns) == (3, 5 * MS)


def test_who_has_joined_is_known_by_the_word_of_the_worker_that_decodes():
    moved = stamps()
    moved.arrived(4 * MS, output(queue_ms=1, prefill_ms=2))
    assert not moved.has_joined
    moved.arrived(8 * MS, output(join_ms=0.25))
    assert moved.has_joined
