"""The demo's table accounts for every millisecond of a request, and fits a terminal."""

import io
from dataclasses import fields, replace

import pytest
from rich.console import Console

from moonshard.experiments.demo.tables import Account, handoff_rows, phase_rows, time_table
from moonshard.rpc.types import Timing

TIMING = Timing(
    e2e_ms=100.0,
    ttft_ms=34.0,
    gateway_queue_ms=1.0,
    first_token_ms=33.0,
    decode_ms=65.0,
    finish_ms=1.0,
    worker_queue_ms=4.0,
    worker_prefill_ms=25.0,
    worker_decode_ms=58.5,
    wire_ms=1.0,
    lost_ms=2.0,
    decode_queue_ms=1.0,
    handoff_gap_ms=9.0,
    transfer_ms=6.0,
    exposed_transfer_ms=2.0,
    land_ms=3.0,
    join_ms=0.5,
)


def account(title: str, timing: Timing = TIMING) -> Account:
    return Account(title=title, num_prompt_tokens=2018, num_completion_tokens=17, timing=timing)


def test_the_phases_add_up_to_the_end_to_end_time():
    assert sum(elapsed_ms for _, elapsed_ms in phase_rows(TIMING)) == pytest.approx(TIMING.e2e_ms)


def test_every_phase_of_a_handoff_that_a_client_waits_for_has_a_row_of_its_own():
    shown = [elapsed_ms for _, elapsed_ms in phase_rows(TIMING)]
    for elapsed_ms in (TIMING.exposed_transfer_ms, TIMING.land_ms, TIMING.join_ms, TIMING.worker_decode_ms):
        assert elapsed_ms in shown


def test_the_wire_is_what_no_worker_reported():
    rows = dict(phase_rows(TIMING))
    (wire_ms,) = (elapsed_ms for name, elapsed_ms in rows.items() if name.startswith("wire"))
    assert wire_ms == pytest.approx(1.0 + 65.0 - 2.0 - 3.0 - 0.5 - 58.5)


def test_a_first_token_that_was_long_on_its_way_leaves_no_row_below_zero():
    timing = replace(TIMING, wire_ms=5.0, decode_ms=61.0)  # it took 4 ms more to arrive, and the others did not
    assert dict(phase_rows(timing)) == dict(phase_rows(TIMING))


def test_the_part_of_the_transfer_that_ran_during_the_prefill_is_hidden():
    rows = dict(handoff_rows(TIMING))
    assert rows["of it hidden by prefill"] == pytest.approx(4.0)
    assert rows["first token to second"] == TIMING.handoff_gap_ms


def test_tokens_are_counted_by_the_steps_behind_the_prefill():
    assert account("", replace(TIMING, num_outputs=9)).tokens_a_step == 2.0  # 17, one of the prefill
    assert account("", replace(TIMING, num_outputs=1)).tokens_a_step == 0.0


def test_a_column_for_each_request_fits_a_terminal_of_80_columns():
    slow = replace(TIMING, **{field.name: 1234.56 for field in fields(Timing) if not field.name.startswith("num_")})
    accounts = [account(title, slow) for title in ("document", "tool", "answer", "follow-up", "answer", "gRPC")]
    sink = io.StringIO()
    Console(file=sink, width=80).print(time_table(accounts))
    lines = [line.rstrip() for line in sink.getvalue().splitlines()]
    assert any(line.split()[1:] == ["document", "tool", "answer", "follow-up", "answer", "gRPC"] for line in lines)
    rows = [*phase_rows(slow), ("end to end", 0.0), *handoff_rows(slow)]
    for name, _ in rows:  # nothing wrapped, nothing cut
        (row,) = (line for line in lines if line.startswith(f" {name} ") or line.startswith(f"{name} "))
        assert len(row.removeprefix(" ").removeprefix(name).split()) == len(accounts)
