"""The demo's tables account for every millisecond of a request."""

import pytest

from moonshard.experiments.demo import HttpTimes, grpc_rows, http_rows
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
    worker_decode_ms=66.5,
    wire_ms=1.0,
)


def test_the_rows_of_a_grpc_request_add_up_to_its_end_to_end_time():
    assert sum(elapsed_ms for _, elapsed_ms in grpc_rows(TIMING)) == pytest.approx(TIMING.e2e_ms)


def test_the_rows_of_an_http_request_add_up_to_its_end_to_end_time():
    times = HttpTimes(first_chunk_ms=10.0, last_chunk_ms=50.0, end_ms=51.5, num_tokens=9)
    assert sum(elapsed_ms for _, elapsed_ms in http_rows(times)) == pytest.approx(51.5)
