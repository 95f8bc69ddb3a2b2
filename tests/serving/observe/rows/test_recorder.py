"""What was appended is read back, whatever the disk does and whenever the process dies; and nobody waits for it."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from moonshard.serving.config.keys import ConfigError, TraceConfig
from moonshard.serving.observe.rows import recorder as module
from moonshard.serving.observe.rows.origin import this_process, unix_offset_ns
from moonshard.serving.observe.rows.parts import read_table, write_part
from moonshard.serving.observe.rows.recorder import Recorder, recording
from moonshard.serving.observe.rows.schema import TOKENS, Table, TableRow

A_LONG_TIME_S = 1000.0


def token(index: int) -> TableRow:
    return ("a request", 0, index, time.perf_counter_ns())


def a_recorder(
    path: Path,
    *tables: Table,
    max_rows: int = 10,
    max_age_s: float = A_LONG_TIME_S,
    max_bytes: int = 1 << 40,
) -> Recorder:
    recorder = Recorder(path, tables or [TOKENS], max_rows=max_rows, max_age_s=max_age_s, max_bytes=max_bytes)
    recorder.start()
    return recorder


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def parts(path: Path) -> list[Path]:
    return sorted((path / "tokens").iterdir())


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
    recorder = a_recorder(tmp_path, max_rows=100_000, max_age_s=0.001)  # no part is ever full: none may be lost

    def append(name: str) -> None:
        for index in range(1000):
            recorder.rows(TOKENS).append((name, 0, index, time.perf_counter_ns()))

    threads = [threading.Thread(target=append, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    assert recorder.num_lost == 0
    found = read_table(tmp_path, TOKENS)
    assert sorted(found.select("request_id", "index").iter_rows()) == [(n, i) for n in "abcd" for i in range(1000)]


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
    code = "import time; from moonshard.serving.observe.rows.origin import this_process as p"
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
    recorder = a_recorder(tmp_path)
    (tmp_path / "tokens").touch()  # no folder can be made any more
    for index in range(25):
        recorder.rows(TOKENS).append(token(index))
    recorder.close()
    assert (recorder.num_lost, recorder.num_failures) == (25, 3)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "File exists" in told[0]
    assert told[1].endswith("25 rows are lost")


def test_that_rows_are_written_again_is_told_too(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    recorder = a_recorder(tmp_path, max_rows=1)
    (tmp_path / "tokens").touch()
    recorder.rows(TOKENS).append(token(0))
    until(lambda: recorder.num_lost == 1)
    (tmp_path / "tokens").unlink()
    for index in (1, 2):
        recorder.rows(TOKENS).append(token(index))
    recorder.close()
    assert read_table(tmp_path, TOKENS)["index"].to_list() == [1, 2]
    told = [record.getMessage() for record in caplog.records]
    assert ["are written again; 1 were lost" in text for text in told] == [False, True, False]


def test_that_one_table_cannot_be_written_is_told_once_however_often_others_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    other = Table("other", TOKENS.columns)
    recorder = a_recorder(tmp_path, TOKENS, other)
    (tmp_path / "tokens").touch()
    for index in range(50):
        recorder.rows(TOKENS).append(token(index))
        recorder.rows(other).append(token(index))
    recorder.close()
    assert (recorder.num_lost, recorder.num_failures) == (50, 5)
    assert read_table(tmp_path, other).height == 50
    assert ["rows are lost" in record.getMessage() for record in caplog.records] == [False, True]


async def test_a_folder_that_cannot_be_written_to_ends_the_start(tmp_path: Path):
    (tmp_path / "a file").touch()
    for path in (tmp_path / "a file", tmp_path / "a file" / "below"):
        with pytest.raises(ConfigError, match=r"trace\.path: .*a file"):
            async with recording(TraceConfig(path=path), TOKENS):
                pass


def test_a_row_that_no_column_can_hold_is_lost_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    recorder = a_recorder(tmp_path, max_rows=100)
    unfit: list[TableRow] = [("a", 0, 2**63, 0), ("\ud800", 0, 0, 0), ("a", "b", 0, 0), ("a", 0, 0, -(2**63) - 1)]
    for index in range(50):
        recorder.rows(TOKENS).append(token(index))
        if index % 10 == 0 and unfit:
            recorder.rows(TOKENS).append(unfit.pop())
    recorder.close()
    assert read_table(tmp_path, TOKENS)["index"].to_list() == list(range(50))
    assert (recorder.num_lost, recorder.num_failures) == (4, 1)
    assert "no column holds it" in caplog.text


def test_no_more_bytes_stay_than_may_and_the_newest_do(tmp_path: Path):
    probe = a_recorder(tmp_path / "probe")
    for index in range(10):
        probe.rows(TOKENS).append(token(index))
    probe.close()
    (part,) = parts(tmp_path / "probe")
    write_part(tmp_path / "tokens" / "another-process.parquet", part.read_bytes())
    recorder = a_recorder(tmp_path, max_age_s=A_LONG_TIME_S, max_bytes=round(3.5 * part.stat().st_size))
    for index in range(200):
        recorder.rows(TOKENS).append(token(index))
        if index % 10 == 9:
            until(lambda: recorder.rows(TOKENS).num_waiting == 0)  # the disk is never too slow
    recorder.close()
    (tmp_path / "tokens" / "another-process.parquet").unlink()  # which is still there: it is not this one's
    assert sorted(read_table(tmp_path, TOKENS)["index"].to_list()) == list(range(170, 200))
    assert recorder.num_lost == 0


def test_parts_that_somebody_else_deletes_are_said_once_and_make_room(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    probe = a_recorder(tmp_path / "probe")
    for index in range(10):
        probe.rows(TOKENS).append(token(index))
    probe.close()
    (part,) = parts(tmp_path / "probe")
    recorder = a_recorder(tmp_path, max_age_s=A_LONG_TIME_S, max_bytes=round(3.5 * part.stat().st_size))
    for batch in range(3):
        for index in range(20 * batch, 20 * batch + 20):
            recorder.rows(TOKENS).append(token(index))
        until(lambda: len(list(tmp_path.glob("tokens/*.parquet"))) == 2)
        if batch < 2:
            shutil.rmtree(tmp_path / "tokens")
    recorder.close()
    assert sorted(read_table(tmp_path, TOKENS)["index"].to_list()) == list(range(40, 60))
    assert [text for text in caplog.messages if "deleted by somebody else" in text] == [
        f"trace {tmp_path}: 2 parts were deleted by somebody else"
    ]


def test_one_part_stays_however_small_the_limit(tmp_path: Path):
    recorder = a_recorder(tmp_path, max_bytes=1)
    for index in range(20):
        recorder.rows(TOKENS).append(token(index))
    recorder.close()
    assert read_table(tmp_path, TOKENS)["index"].to_list() == list(range(10, 20))


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
    until(lambda: recorder.num_failures > 0)
    assert parts(tmp_path) == []
    is_full = False
    recorder.rows(TOKENS).append(token(1))
    recorder.close()
    assert read_table(tmp_path, TOKENS)["index"].to_list() == [1]
    assert recorder.num_lost == 1


class SlowDisk:
    """Parts are written when the test says so."""

    LONGEST_S = 60.0  # then all the same

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_write, self.is_writing = threading.Event(), threading.Event()
        monkeypatch.setattr(module, "write_part", self.write)

    def write(self, path: Path, data: bytes) -> None:
        self.is_writing.set()
        self.may_write.wait(self.LONGEST_S)
        write_part(path, data)


def test_memory_is_bounded_where_the_disk_is_too_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk = SlowDisk(monkeypatch)
    recorder = a_recorder(tmp_path)
    for index in range(10):
        recorder.rows(TOKENS).append(token(index))
    disk.is_writing.wait()
    begun_s = time.perf_counter()
    for index in range(10, 1000):
        recorder.rows(TOKENS).append(token(index))
    assert time.perf_counter() - begun_s < SlowDisk.LONGEST_S / 2  # nobody waited
    num_kept = 10 * (1 + module.MAX_WAITING_PARTS)
    assert recorder.num_lost == 1000 - num_kept
    disk.may_write.set()
    recorder.close()
    assert read_table(tmp_path, TOKENS)["index"].to_list() == list(range(num_kept))


def test_a_table_that_the_disk_is_too_slow_for_costs_no_other_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk, other = SlowDisk(monkeypatch), Table("other", TOKENS.columns)
    recorder = a_recorder(tmp_path, TOKENS, other)
    for index in range(1000):
        recorder.rows(TOKENS).append(token(index))
    for index in range(10 * module.MAX_WAITING_PARTS):
        recorder.rows(other).append(token(index))
    disk.may_write.set()
    recorder.close()
    assert read_table(tmp_path, other)["index"].to_list() == list(range(10 * module.MAX_WAITING_PARTS))
    assert 0 < read_table(tmp_path, TOKENS).height == 1000 - recorder.num_lost


def test_rows_that_are_old_are_written_between_full_parts(tmp_path: Path):
    """The writer that always finds a full part looks after the others all the same."""
    other, is_over = Table("other", TOKENS.columns), threading.Event()
    recorder = a_recorder(tmp_path, TOKENS, other, max_rows=1, max_age_s=0.02)
    recorder.rows(other)._max_rows = 1000  # pyright: ignore[reportPrivateUsage]  # this one is never full

    def fill() -> None:
        while not is_over.is_set():
            recorder.rows(TOKENS).append(token(0))

    filling = threading.Thread(target=fill)
    filling.start()
    try:
        recorder.rows(other).append(token(7))
        until(lambda: read_table(tmp_path, other).height == 1)
    finally:
        is_over.set()
        filling.join()
        recorder.close()


def test_an_end_does_not_wait_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    disk = SlowDisk(monkeypatch)
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.05)
    recorder = a_recorder(tmp_path)
    for index in range(25):
        recorder.rows(TOKENS).append(token(index))
    disk.is_writing.wait()
    begun_s = time.perf_counter()
    recorder.close()
    assert time.perf_counter() - begun_s < 5
    assert recorder.num_lost == 25
    assert "25 rows are lost" in caplog.text
    disk.may_write.set()


def test_what_is_appended_while_it_closes_is_written_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk = SlowDisk(monkeypatch)
    recorder = a_recorder(tmp_path)
    for index in range(10):
        recorder.rows(TOKENS).append(token(index))
    disk.is_writing.wait()
    closing = threading.Thread(target=recorder.close)
    closing.start()
    until(lambda: not recorder._full.empty())  # pyright: ignore[reportPrivateUsage]  # the word that ends its thread
    for index in range(10, 35):
        recorder.rows(TOKENS).append(token(index))
    disk.may_write.set()
    closing.join()
    assert read_table(tmp_path, TOKENS)["index"].to_list() == list(range(35))
    assert recorder.num_lost == 0


KILLED = """
import itertools, sys, time
from pathlib import Path
from moonshard.serving.observe.rows.recorder import Recorder
from moonshard.serving.observe.rows.schema import TOKENS
recorder = Recorder(Path(sys.argv[1]), [TOKENS], max_rows=50, max_age_s=0.01, max_bytes=1 << 40)
recorder.start()
for index in itertools.count():
    recorder.rows(TOKENS).append(("a request", 0, index, time.perf_counter_ns()))
    if index % 50 == 0:
        time.sleep(0.0005)
"""


def test_what_a_killed_process_leaves_is_readable_and_each_part_is_whole(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)])
    try:
        num_read = 0
        while num_read < 2000:
            assert process.poll() is None
            num_read = read_table(tmp_path, TOKENS).height  # while it writes
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert read_table(tmp_path, TOKENS).height >= num_read
    indexes = [pl.read_parquet(part)["index"] for part in (tmp_path / "tokens").glob("*.parquet")]
    for index in indexes:  # rows that follow each other; what is missing lies between parts
        assert index.to_list() == list(range(index[0], index[0] + len(index)))
    assert len({value for index in indexes for value in index}) == sum(map(len, indexes))


async def test_without_a_path_there_is_no_recorder_and_no_thread():
    num_threads = threading.active_count()
    async with recording(TraceConfig(), TOKENS) as recorder:
        assert recorder is None
        assert threading.active_count() == num_threads


def test_who_records_nothing_loads_no_polars():
    code = "import sys, moonshard.serving.gateway.process, moonshard.serving.worker.process; "
    code += "print('polars' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert said.stdout.strip() == "False"


def test_a_worker_loads_no_prometheus():
    code = "import sys, moonshard.serving.worker.process; print('prometheus_client' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert said.stdout.strip() == "False"
