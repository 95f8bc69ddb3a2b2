"""The demo's tables account for every millisecond of a request."""

import pytest

from moonshard.experiments.demo import HttpTimes, grpc_rows, handoff_rows, http_rows
from moonshard.rpc.types import Timing

TIMING = Timing(
    e2e_ms=100.0,
    ttft_ms=31.0,
    gateway_queue_ms=1.0,
    first_token_ms=30.0,
    decode_ms=68.0,
    finish_ms=1.0,
    worker_queue_ms=4.0,
    worker_prefill_ms=25.0,
    worker_decode_ms=61.5,
    wire_ms=1.0,
    handoff_gap_ms=9.0,
    transfer_ms=6.0,
    exposed_transfer_ms=2.0,
    land_ms=3.0,
    join_ms=0.5,
)


def test_the_rows_of_a_grpc_request_add_up_to_its_end_to_end_time():
    assert sum(elapsed_ms for _, elapsed_ms in grpc_rows(TIMING)) == pytest.approx(TIMING.e2e_ms)


def test_the_rows_of_an_http_request_add_up_to_its_end_to_end_time():
    times = HttpTimes(first_chunk_ms=10.0, last_chunk_ms=50.0, end_ms=51.5, num_tokens=9)
    assert sum(elapsed_ms for _, elapsed_ms in http_rows(times)) == pytest.approx(51.5)


def test_every_phase_of_a_handoff_that_a_client_waits_for_has_a_row_of_its_own():
    shown = [elapsed_ms for _, elapsed_ms in grpc_rows(TIMING)]
    for elapsed_ms in (TIMING.exposed_transfer_ms, TIMING.land_ms, TIMING.join_ms, TIMING.worker_decode_ms):
        assert elapsed_ms in shown


def test_the_rest_of_the_decode_phase_is_what_no_worker_reported():
    rows = dict(grpc_rows(TIMING))
    (rest_ms,) = (elapsed_ms for name, elapsed_ms in rows.items() if name.startswith("wire: between"))
    assert rest_ms == pytest.approx(68.0 - 2.0 - 3.0 - 0.5 - 61.5)


def test_the_part_of_the_transfer_that_ran_during_the_prefill_is_hidden():
    rows = dict(handoff_rows(TIMING))
    assert rows["of this, hidden behind the prefill"] == pytest.approx(4.0)
    assert rows["handoff gap: the first token to the second"] == TIMING.handoff_gap_ms
