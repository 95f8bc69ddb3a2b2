"""Durations of requests that move or go on elsewhere, read from logs whose stamps a test chooses."""

import pytest

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc import link_pb2
from moonshard.serving.gateway.records.events import (
    AttemptMoved,
    AttemptReserved,
    FirstDelivered,
    RequestEnded,
    RequestRetried,
    TokensArrived,
)
from moonshard.serving.gateway.records.log import RequestLog
from moonshard.serving.gateway.records.times import RequestTimes
from tests.serving.gateway.records.logs import arrived, log_of, sent

MS = 1_000_000
MOVED = link_pb2.TransferPhases(transfer_ms=3, exposed_ms=1)


def begun() -> RequestLog:
    log = log_of(num_choices=2)
    log.append(sent(1 * MS))
    log.append(FirstDelivered(at_ns=9 * MS))
    return log


def ended(log: RequestLog, at_ms: int = 100, *, outcome: str = "completed") -> RequestTimes:
    log.append(RequestEnded(outcome, at_ns=at_ms * MS))
    return log.times


def timing(log: RequestLog) -> pb.Timing:
    return ended(log).timing()


def test_the_gap_is_between_the_first_two_outputs_of_the_first_choice():
    moved = begun()
    for at_ms, choice in ((4, 0), (5, 1), (6, 1), (10, 0), (30, 0)):
        moved.append(arrived(at_ms * MS, choice))
    moved.append(AttemptMoved(MOVED))
    found = timing(moved)
    assert (found.handoff_gap_ms, found.transfer_ms, found.exposed_transfer_ms) == (6, 3, 1)
    assert found.num_outputs == 5  # of both choices


def test_a_request_that_did_not_move_has_no_gap():
    stayed = begun()
    stayed.append(arrived(4 * MS))
    stayed.append(arrived(10 * MS))
    assert timing(stayed).handoff_gap_ms == 0


def test_the_decode_workers_phases_leave_the_prefill_workers_alone():
    moved = begun()
    moved.append(arrived(4 * MS, queue_ms=1, prefill_ms=2))
    moved.append(arrived(8 * MS, land_ms=0.5, join_ms=0.25))
    moved.append(arrived(9 * MS, decode_ms=4))
    moved.append(AttemptMoved(link_pb2.TransferPhases()))
    found = timing(moved)
    assert (found.worker_queue_ms, found.worker_prefill_ms, found.worker_decode_ms) == (1, 2, 4)
    assert (found.land_ms, found.join_ms, found.wire_ms) == (0.5, 0.25, 0)


def test_what_another_worker_did_before_it_went_on_is_no_part_of_the_first_tokens_time():
    lost = begun()
    lost.append(arrived(4 * MS, queue_ms=1, prefill_ms=2))
    lost.append(RequestRetried("worker_gone"))
    lost.append(arrived(90 * MS, queue_ms=30, prefill_ms=40, decode_ms=5))
    found = timing(lost)
    assert (found.worker_queue_ms, found.worker_prefill_ms, found.worker_decode_ms) == (1, 2, 5)
    assert (found.wire_ms, found.num_retries) == (0, 1)


def test_a_choice_that_waited_for_a_slot_of_its_own_is_no_part_of_the_first_tokens_time():
    both = begun()
    both.append(arrived(4 * MS, queue_ms=1, prefill_ms=2))
    both.append(arrived(90 * MS, 1, queue_ms=1, prefill_ms=88))
    found = timing(both)
    assert (found.worker_queue_ms, found.worker_prefill_ms, found.wire_ms) == (1, 2, 0)


def test_a_request_begun_anew_before_its_first_token_has_the_phases_of_the_worker_that_gave_it():
    lost = begun()
    lost.append(AttemptReserved(7))
    lost.append(RequestRetried("worker_gone"))
    lost.append(sent(20 * MS))
    lost.append(arrived(91 * MS, queue_ms=30, prefill_ms=40))
    found = timing(lost)
    assert (found.worker_queue_ms, found.worker_prefill_ms) == (30, 40)
    assert found.first_token_ms == pytest.approx(90)
    assert (found.lost_ms, found.decode_queue_ms, found.wire_ms) == (19, 0, 1)


def test_the_wait_for_room_at_the_decode_worker_is_no_wire():
    moved = begun()
    moved.append(AttemptReserved(50))
    moved.append(arrived(64 * MS, queue_ms=4, prefill_ms=8))
    found = timing(moved)
    assert (found.decode_queue_ms, found.lost_ms, found.wire_ms) == (50, 0, 1)


def test_an_attempt_that_goes_on_behind_the_first_token_changes_nothing_before_it():
    moved = begun()
    moved.append(AttemptReserved(1))
    moved.append(arrived(4 * MS, queue_ms=1, prefill_ms=1))
    moved.append(sent(50 * MS))
    moved.append(arrived(60 * MS))
    found = timing(moved)
    assert (found.decode_queue_ms, found.lost_ms, found.wire_ms, found.first_token_ms) == (1, 0, 0, 3)


@pytest.mark.parametrize(("outcome", "phases_ms"), [("completed", (1, 3, 0, 6)), ("cancelled", (1, 3, 6, 0))])
def test_the_time_of_a_request_is_measured_and_not_made_of_its_phases(outcome: str, phases_ms: tuple[int, ...]):
    log = begun()
    log.append(arrived(4 * MS))
    times = ended(log, 10, outcome=outcome)
    assert times.e2e_ns == 10 * MS
    assert times.phases_ns == tuple(phase_ms * MS for phase_ms in phases_ms)


def test_nothing_is_known_of_the_time_of_a_request_that_still_runs():
    with pytest.raises(RuntimeError):
        _ = begun().times


def test_kv_that_moved_in_vain_is_no_part_of_the_attempt_that_gave_the_first_token():
    lost = begun()
    lost.append(AttemptMoved(MOVED, at_ns=5 * MS))
    lost.append(RequestRetried("corrupt"))
    lost.append(sent(20 * MS))
    lost.append(arrived(30 * MS, queue_ms=1, prefill_ms=2))
    times = ended(lost)
    assert (times.transfer, times.transferred_ns, times.timing().transfer_ms) == (None, 0, 0)


def test_kv_that_moved_stays_a_part_of_a_request_that_goes_on_behind_its_first_token():
    moved = begun()
    moved.append(arrived(4 * MS))
    moved.append(AttemptMoved(MOVED, at_ns=5 * MS))
    moved.append(sent(20 * MS))
    times = ended(moved)
    assert (times.timing().transfer_ms, times.transferred_ns) == (3, 5 * MS)


def test_who_has_joined_is_known_by_the_word_of_the_worker_that_decodes():
    moved = begun()
    moved.append(arrived(4 * MS, queue_ms=1, prefill_ms=2))
    assert not moved.outputs.has_joined
    moved.append(arrived(8 * MS, join_ms=0.25))
    assert moved.outputs.has_joined


def test_what_comes_after_the_end_takes_no_time():
    """A stop string may end a choice while further tokens of it are here already."""
    log = begun()
    log.append(arrived(10 * MS, is_last=True))
    log.append(TokensArrived(99 * MS, link_pb2.SequenceOutput(token_ids=[6]), None))
    times = ended(log)
    assert (times.outputs.last_ns, times.handoff_gap_ns) == (10 * MS, None)
    assert log.usage().completion_tokens == 1
