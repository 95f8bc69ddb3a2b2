"""What a failure means for the next attempt: which workers it avoids, and when no attempt follows."""

import pytest

from moonshard.serving.control.dispatch.retries import LegFailure, Retries, is_retryable
from moonshard.serving.control.handoff.messages import Cause

DECODE, PREFILL = 1, 2


@pytest.mark.parametrize(
    ("failure", "failed_epochs"),
    [
        (LegFailure.WORKER_GONE, {DECODE}),
        (Cause.OVERLOADED, {DECODE}),
        (Cause.DECODE_GONE, {DECODE}),
        (Cause.PREFILL_GONE, {PREFILL}),
        (Cause.CORRUPT, {DECODE, PREFILL}),
        (Cause.WRITE_FAILED, {DECODE, PREFILL}),
        (Cause.LEASE, {DECODE, PREFILL}),
    ],
)
def test_a_request_avoids_whoever_may_be_to_blame_and_nobody_else(failure: Cause | LegFailure, failed_epochs: set[int]):
    retries = Retries(max_attempts=9)
    assert retries.failed(failure, decode_epoch=DECODE, prefill_epoch=PREFILL)
    assert retries.failed_epochs == failed_epochs
    assert retries.num_prefill_failed == (PREFILL in failed_epochs)


@pytest.mark.parametrize("failure", [LegFailure.REFUSED, Cause.CANCELLED])
def test_what_is_the_requests_own_is_final(failure: Cause | LegFailure):
    assert not is_retryable(failure)
    assert not Retries(max_attempts=9).failed(failure, decode_epoch=DECODE, prefill_epoch=None)


def test_attempts_are_not_without_end():
    retries = Retries(max_attempts=3)
    assert [retries.failed(LegFailure.WORKER_GONE, decode_epoch=epoch, prefill_epoch=None) for epoch in range(3)] == [
        True,
        True,
        False,
    ]


def test_after_two_prefills_that_failed_the_decode_worker_prefills():
    retries = Retries(max_attempts=9)
    for failure in (Cause.PREFILL_GONE, Cause.OVERLOADED):
        retries.failed(failure, decode_epoch=DECODE, prefill_epoch=PREFILL)
        assert retries.may_prefill_elsewhere
    retries.failed(Cause.CORRUPT, decode_epoch=DECODE, prefill_epoch=PREFILL)
    assert not retries.may_prefill_elsewhere


def test_only_the_last_failure_tells_of_no_room():
    retries = Retries(max_attempts=9)
    retries.failed(Cause.OVERLOADED, decode_epoch=DECODE, prefill_epoch=PREFILL, retry_after_s=2.5)
    assert retries.no_room_retry_after_s == 2.5
    retries.failed(Cause.LEASE, decode_epoch=DECODE, prefill_epoch=PREFILL, retry_after_s=2.5)
    assert retries.no_room_retry_after_s is None


def test_a_new_request_waits_for_no_worker_and_one_that_lost_its_own_waits_once():
    retries = Retries(max_attempts=9)
    assert retries.waits(100.0, 10.0) is None
    retries.failed(LegFailure.WORKER_GONE, decode_epoch=DECODE, prefill_epoch=None)
    assert [retries.waits(now_s, 10.0) for now_s in (100.0, 105.0, 109.9, 110.0)] == [110.0, 110.0, 110.0, None]
