"""What was appended is read back, whatever the disk does and whenever the process dies; and nobody waits for it."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonshard.serving.config import TraceConfig
from moonshard.serving.trace import recorder as module
from moonshard.serving.trace.origin import this_process, unix_offset_ns
from moonshard.serving.trace.parts import PartsError, encode_part, read_table, write_part
from moonshard.serving.trace.recorder import Recorder, recording
from moonshard.serving.trace.schema import ORIGIN, REQUESTS, STEPS, TABLES, TOKENS, Kind, Row, Table, Value

A_LONG_TIME_S = 1000.0
_VALUES: dict[Kind, st.SearchStrategy] = {
    "text": st.text(st.characters(exclude_categories=["Cs"])),
    "int": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "ints": st.lists(st.integers(0, 2**31)).map(tuple),
}


def rows_of(table: Table) -> st.SearchStrategy[list[Row]]:
    cells = (_VALUES[c.kind] | st.none() if c.is_optional else _VALUES[c.kind] for c in table.columns)
    return st.lists(st.tuples(*cells), max_size=5)


def token(index: int) -> Row:
    return ("a request", 0, index, time.perf_counter_ns())


def a_recorder(path: Path, *, max_rows: int = 10, max_age_s: float = A_LONG_TIME_S) -> Recorder:
    recorder = Recorder(path, [TOKENS], max_rows=max_rows, max_age_s=max_age_s)
    recorder.start()
    return recorder


def parts(path: Path) -> list[Path]:
    return sorted((path / "tokens").iterdir())


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_rows_come_back_as_they_were(table: Table, tmp_path_factory: pytest.TempPathFactory):
    @settings(max_examples=30, deadline=None)
    @given(rows=rows_of(table))
    def check(rows: list[Row]):
        folder = tmp_path_factory.mktemp("recording")
        columns: list[list[Value]] = [[row[index] for row in rows] for index in range(len(table.columns))]
        origin = this_process().row()
        write_part(folder / table.name / "part.parquet", encode_part(table, columns, origin))
        expected = [[list(v) if isinstance(v, tuple) else v for v in (*row, *origin)] for row in rows]
        for frame in (pl.read_parquet(folder / table.name / "*.parquet"), read_table(folder, table)):
            assert frame.columns == [column.name for column in table.all_columns]
            assert [list(row) for row in frame.iter_rows()] == expected

    check()


def test_a_full_part_is_followed_by_another_and_the_rest_is_written_at_the_end(tmp_path: Path):
    recorder = a_recorder(tmp_path)
    for index in range(25):
        recorder.rows(TOKENS).append(token(index))
    recorder.close()
    assert [pl.read_parquet(part).height for part in parts(tmp_path)] == [10, 10, 5]
    assert read_table(tmp_path, TOKENS)["index"].to_list() == list(range(25))
    assert (recorder.num_lost, recorder.num_failures) == (0, 0)


def test_a_row_is_written_when_it_is_old(tmp_path: Path):
    recorder = a_recorder(tmp_path, max_age_s=0.05)
    for index in range(2):
        recorder.rows(TOKENS).append(token(index))
        while read_table(tmp_path, TOKENS).height <= index:
            time.sleep(0.01)
    recorder.close()
    assert len(parts(tmp_path)) == 2


def test_rows_of_several_threads_are_all_there(tmp_path: Path):
    recorder = a_recorder(tmp_path, max_rows=100, max_age_s=0.001)

    def append() -> None:
        for index in range(1000):
            recorder.rows(TOKENS).append(token(index))

    threads = [threading.Thread(target=append) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    assert read_table(tmp_path, TOKENS).height + recorder.num_lost == 4000


def test_a_part_names_its_process_and_ties_its_clock_to_the_time_of_day(tmp_path: Path):
    recorder = a_recorder(tmp_path)
    recorder.rows(TOKENS).append(token(0))
    recorder.close()
    (row,) = read_table(tmp_path, TOKENS).iter_rows(named=True)
    assert (row["pid"], row["clock"], row["host"]) == (os.getpid(), this_process().clock, this_process().host)
    assert abs(row["unix_offset_ns"] - unix_offset_ns()) < 1e9
    assert abs(row["arrived_ns"] + row["unix_offset_ns"] - time.time_ns()) < 60e9
    assert parts(tmp_path)[0].stat().st_mode & 0o077 == 0


def test_all_processes_of_a_host_have_one_clock():
    code = "import time; from moonshard.serving.trace.origin import this_process as p"
    code += "; print(p().clock, p().pid, time.perf_counter_ns())"
    before_ns = time.perf_counter_ns()
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    clock, pid, stamp_ns = said.stdout.split()
    assert clock == this_process().clock
    assert int(pid) != os.getpid()
    assert before_ns < int(stamp_ns) < time.perf_counter_ns()


def test_a_part_that_cannot_be_written_is_told_once_and_its_rows_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "a file").touch()
    recorder = a_recorder(tmp_path / "a file")
    for index in range(25):
        recorder.rows(TOKENS).append(token(index))
    recorder.close()
    assert (recorder.num_lost, recorder.num_failures) == (25, 3)
    assert len(caplog.records) == 1
    assert "Not a directory" in caplog.text


def test_on_a_full_disk_no_half_file_is_left_and_what_comes_after_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    is_full = True

    def write(path: Path, data: bytes) -> None:
        if is_full:
            monkeypatch.setattr(Path, "rename", full)
        try:
            write_part(path, data)
        finally:
            monkeypatch.undo()
            monkeypatch.setattr(module, "write_part", write)

    def full(_self: Path, _target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_part", write)
    recorder = a_recorder(tmp_path, max_age_s=0.01)
    recorder.rows(TOKENS).append(token(0))
    while not recorder.num_failures:
        time.sleep(0.005)
    assert parts(tmp_path) == []
    is_full = False
    recorder.rows(TOKENS).append(token(1))
    recorder.close()
    assert read_table(tmp_path, TOKENS)["index"].to_list() == [1]
    assert recorder.num_lost == 1


def test_memory_is_bounded_where_the_disk_is_too_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    may_write, is_writing = threading.Event(), threading.Event()

    def slow(path: Path, data: bytes) -> None:
        is_writing.set()
        may_write.wait()
        write_part(path, data)

    monkeypatch.setattr(module, "write_part", slow)
    recorder = a_recorder(tmp_path)
    for index in range(10):
        recorder.rows(TOKENS).append(token(index))
    is_writing.wait()
    begun_s = time.perf_counter()
    for index in range(10, 1000):
        recorder.rows(TOKENS).append(token(index))
    assert time.perf_counter() - begun_s < 1.0  # nobody waited
    num_kept = 10 * (1 + module.MAX_WAITING_PARTS)
    assert recorder.num_lost == 1000 - num_kept
    may_write.set()
    recorder.close()
    assert read_table(tmp_path, TOKENS)["index"].to_list() == list(range(num_kept))


KILLED = """
import itertools, sys, time
from pathlib import Path
from moonshard.serving.trace.recorder import Recorder
from moonshard.serving.trace.schema import TOKENS
recorder = Recorder(Path(sys.argv[1]), [TOKENS], max_rows=50, max_age_s=0.01)
recorder.start()
for index in itertools.count():
    recorder.rows(TOKENS).append(("a request", 0, index, time.perf_counter_ns()))
    if index % 50 == 0:
        time.sleep(0.0005)
"""


def test_what_a_killed_process_leaves_is_readable_and_has_no_gap(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)])
    try:
        num_read = 0
        while num_read < 2000:
            assert process.poll() is None
            num_read = read_table(tmp_path, TOKENS).height  # while it writes
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    found = read_table(tmp_path, TOKENS)
    assert found.height >= num_read
    # Parts that the disk was too slow for are gone whole; every part that is there is whole.
    assert set(found["index"].diff().drop_nulls().to_list()) <= {1, *range(51, 100_000)}


def test_parts_of_another_table_are_refused_and_no_parts_are_no_rows(tmp_path: Path):
    assert read_table(tmp_path, STEPS).schema == read_table(tmp_path / "none", STEPS).schema
    assert read_table(tmp_path, REQUESTS).is_empty()
    write_part(tmp_path / "steps" / "part.parquet", encode_part(TOKENS, [[], [], [], []], this_process().row()))
    with pytest.raises(PartsError, match="not those of steps"):
        read_table(tmp_path, STEPS)
    (tmp_path / "steps" / "part.parquet").write_bytes(b"PAR1")
    with pytest.raises(PartsError, match=r"part\.parquet"):
        read_table(tmp_path, STEPS)


async def test_without_a_path_there_is_no_recorder_and_no_thread():
    num_threads = threading.active_count()
    async with recording(TraceConfig(), TOKENS) as recorder:
        assert recorder is None
        assert threading.active_count() == num_threads


def test_who_records_nothing_loads_no_polars():
    code = "import sys, moonshard.serving.gateway.main, moonshard.serving.worker_process; "
    code += "print('polars' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert said.stdout.strip() == "False"


def test_the_origin_has_the_columns_of_its_table():
    assert len(this_process().row()) == len(ORIGIN)
