"""One time line of all processes: what happened at the same time stands at the same place, and nothing is lost."""

import json
from pathlib import Path

import pytest

from moonshard.serving.cli import main
from moonshard.serving.observe.rows.origin import this_process
from moonshard.serving.observe.rows.parts import encode_part, write_part
from moonshard.serving.observe.rows.schema import PHASES, REQUESTS, STEPS, Table, Value
from moonshard.serving.observe.rows.timeline import timeline
from tests.serving.observe.rows.trace_format import check_format

ORIGIN = {"host": "h", "clock": "boot", "pid": 7, "unix_offset_ns": 1_700_000_000_000_000_000, "version": 1}
NO_REQUEST = {column.name: None for column in REQUESTS.columns}
REQUEST = NO_REQUEST | {
    "request_id": "r",
    "model": "kimi",
    "tenant": "t",
    "outcome": "completed",
    "num_choices": 1,
    "completion_tokens": 3,
    "num_retries": 0,
    "received_ns": 1_000_000,
    "e2e_ns": 10_000,
    "gateway_queue_ns": 1_000,
    "first_token_ns": 4_000,
    "decode_ns": 5_000,
    "finish_ns": 0,
    "transferred_ns": 1_006_000,
    "transfer_ms": 0.002,
}
STEP = {
    "worker": "w",
    "epoch": "00" * 16,
    "role": "prefill",
    "number": 3,
    "kind": "prefill",
    "partitions": (0,),
    "bucket": 64,
    "batch": 1,
    "tokens": 40,
    "context_tokens": 40,
    "blocks": 0,
    "was_overlapped": False,
    "launched_ns": 1_001_500,
    "host_ns": 200,
    "device_ns": 2_500,
    "done_ns": 1_004_000,
    "handled_ns": 1_004_100,
}


def events_of(requests: list[dict], steps: list[dict]) -> list[dict]:
    drawn = timeline([ORIGIN | row for row in requests], [ORIGIN | row for row in steps])
    return check_format(json.loads(json.dumps(drawn)))


def spans(events: list[dict], name: str) -> list[tuple[float, float]]:
    begins = [event["ts"] for event in events if event["name"] == name and event["ph"] == "b"]
    ends = [event["ts"] for event in events if event["name"] == name and event["ph"] == "e"]
    return list(zip(begins, ends, strict=True))


def test_a_request_its_phases_its_transfer_and_its_steps_are_at_their_microseconds():
    events = events_of([REQUEST], [STEP])
    assert spans(events, "request r") == [(0.0, 10.0)]
    assert spans(events, "gateway_queue") == [(0.0, 1.0)]
    assert spans(events, "first_token") == [(1.0, 5.0)]
    assert spans(events, "decode") == [(5.0, 10.0)]
    assert spans(events, "finish") == []
    assert spans(events, "transfer r") == [(4.0, 6.0)]
    device, host = (event for event in events if event["ph"] == "X")
    assert (device["ts"], device["dur"]) == (1.5, 2.5)
    assert (host["ts"], host["dur"]) == (1.5, 0.2)
    assert device["args"]["tokens"] == 40
    titles = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert titles == ["gateway h 7", "prefill w 00000000", "transfer"]


def test_a_transfer_that_ends_in_another_phase_than_it_begins_in_is_stacked_upon_none():
    events = events_of([REQUEST], [])
    (begin_us, end_us), (_, first_token_us) = spans(events, "transfer r")[0], spans(events, "first_token")[0]
    assert begin_us < first_token_us < end_us
    with pytest.raises(AssertionError):  # were its identity everybody's, as it is not
        check_format(
            {"displayTimeUnit": "ms", "traceEvents": [e | {"id": "r"} if e["ph"] in "be" else e for e in events]}
        )


def test_steps_that_follow_each_other_to_the_nanosecond_do_not_overlap():
    stamps_ns = [1_000_000 + 333 * index for index in range(1000)]
    steps = [
        STEP | {"launched_ns": begin, "device_ns": 333, "host_ns": 333, "done_ns": begin + 333} for begin in stamps_ns
    ]
    assert sum(event["ph"] == "X" for event in events_of([], steps)) == 2000


def test_parts_of_one_clock_that_disagree_on_the_time_of_day_keep_their_order():
    later = STEP | {"unix_offset_ns": ORIGIN["unix_offset_ns"] - 50_000_000}
    for steps in ([later], [later, STEP | {"worker": "another"}]):
        events = events_of([REQUEST], steps)
        assert all(event["ts"] == 1.5 for event in events if event["ph"] == "X")


def test_another_hosts_stamps_stand_where_its_time_of_day_puts_them():
    elsewhere = STEP | {"clock": "another boot", "unix_offset_ns": ORIGIN["unix_offset_ns"] + 7_000}
    (device, _) = (event for event in events_of([REQUEST], [elsewhere]) if event["ph"] == "X")
    assert device["ts"] == 8.5


def test_requests_of_one_name_are_two():
    again = REQUEST | {"received_ns": 1_002_000}
    identities = {event["id2"]["local"] for event in events_of([REQUEST, again], []) if event["ph"] == "b"}
    assert len(identities) == 2


def test_a_request_that_was_refused_is_there_with_its_error():
    refused = NO_REQUEST | {name: REQUEST[name] for name in ("request_id", "received_ns", "num_retries")}
    refused |= dict.fromkeys(PHASES, 0) | {"e2e_ns": 300, "gateway_queue_ns": 300, "outcome": "x", "error": "full"}
    events = events_of([refused], [])
    assert spans(events, "request r") == [(0.0, 0.3)]
    assert next(event for event in events if event["name"] == "request r")["args"]["error"] == "full"


def test_nothing_is_an_empty_time_line():
    assert events_of([], []) == []


def record(folder: Path, table: Table, row: dict) -> None:
    cells: list[list[Value]] = [[row[column.name]] for column in table.columns]
    write_part(folder / table.name / "part.parquet", encode_part(table, cells, this_process().row()))


def test_the_command_draws_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    record(tmp_path, REQUESTS, REQUEST)
    record(tmp_path, STEPS, STEP)
    out = tmp_path / "out.json"
    assert main(["trace", str(tmp_path), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"1 requests and 1 steps in {out}\n"
    assert spans(check_format(json.loads(out.read_text())), "request r") == [(0.0, 10.0)]


def test_what_cannot_be_drawn_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["trace", str(tmp_path)]) == 2
    assert "nothing is recorded there" in capsys.readouterr().err
    record(tmp_path, STEPS, STEP)
    assert main(["trace", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err
    (tmp_path / "steps" / "bad.parquet").write_bytes(b"PAR1")
    assert main(["trace", str(tmp_path)]) == 2
    assert "bad.parquet" in capsys.readouterr().err
