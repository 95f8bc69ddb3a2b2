"""Output that finds no room: pipes that nobody reads, terminals that somebody has stopped, disks that are full."""

import io
import os
import re
import socket
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moonshard.serving.deploy.unblocked_output import UnblockedOutput, unblocked_output

LINE = b"a line of a log\n"
TOLD = re.compile(rb"moonshard: (\d+) lines of output found no room here and were dropped\n")


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


def drained(reader: int) -> bytes:
    """What is in a pipe or at the other end of a terminal now."""
    os.set_blocking(reader, False)
    found = b""
    try:
        while data := os.read(reader, 1 << 20):
            found += data
    except BlockingIOError:
        pass
    return found


def test_lines_that_find_no_room_are_counted_and_the_count_stands_before_the_next_that_does():
    with pipe() as (reader, writer):
        output = UnblockedOutput(writer)
        for _ in range(10_000):
            assert output.write(LINE) == len(LINE)
        kept = drained(reader)
        assert kept == LINE * (len(kept) // len(LINE))  # whole ones
        num_dropped = 10_000 - len(kept) // len(LINE)
        assert 0 < num_dropped == output.num_dropped_lines
        output.write(b"there is room again\n")
        told = drained(reader)
        assert int(TOLD.findall(told)[0]) == num_dropped
        assert TOLD.sub(b"", told) == b"there is room again\n"
        output.write(LINE)
        assert drained(reader) == LINE  # told once


def test_a_line_of_which_only_a_part_finds_room_is_dropped_and_ended_before_the_next():
    with pipe() as (reader, writer):
        output = UnblockedOutput(writer)
        output.write(b"x" * (1 << 20) + b"\n")
        assert output.num_dropped_lines == 1
        assert set(drained(reader)) == {ord("x")}
        output.write(LINE)
        assert re.fullmatch(rb"\n" + TOLD.pattern + LINE, drained(reader))


def test_what_was_never_told_is_told_at_the_end():
    with pipe() as (reader, writer):
        output = UnblockedOutput(writer)
        for _ in range(10_000):
            output.write(LINE)
        drained(reader)
        output.close()
        assert TOLD.fullmatch(drained(reader))


def test_a_stopped_terminal_holds_nobody_up_and_its_shell_keeps_its_own_settings():
    controller, terminal = os.openpty()
    try:
        tty.setraw(terminal)
        output = UnblockedOutput(terminal)
        termios.tcflow(terminal, termios.TCOOFF)  # what Ctrl-S does
        output.write(LINE)
        assert output.num_dropped_lines == 1
        termios.tcflow(terminal, termios.TCOON)
        output.write(LINE)
        assert TOLD.fullmatch(drained(controller).removesuffix(LINE))
        assert os.get_blocking(terminal)
        assert output.isatty()
        output.close()
    finally:
        os.close(controller)
        os.close(terminal)


def test_a_socket_that_nobody_reads_holds_nobody_up():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        output = UnblockedOutput(ours.fileno())
        while not output.num_dropped_lines:
            output.write(LINE * 100)
        assert ours.getblocking()


def test_a_full_disk_and_a_reader_that_is_gone_are_no_errors():
    with open("/dev/full", "wb", buffering=0) as full:
        output = UnblockedOutput(full.fileno())
        output.write(LINE)
        assert output.num_dropped_lines == 1
    reader, writer = os.pipe()
    output = UnblockedOutput(writer)
    os.close(reader)
    output.write(LINE)
    assert output.num_dropped_lines == 1
    os.close(writer)


def test_a_file_is_written_to_where_it_was(tmp_path: Path):
    path = tmp_path / "log"
    path.write_bytes(LINE)
    with path.open("ab", buffering=0) as log:
        UnblockedOutput(log.fileno()).write(LINE)
    assert path.read_bytes() == LINE * 2


def test_stdout_and_stderr_are_so_inside_the_block_alone(monkeypatch: pytest.MonkeyPatch):
    with pipe() as (reader, writer), os.fdopen(os.dup(writer), "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "stdout", in_memory := io.StringIO())
        stream.write("before\n")
        with unblocked_output():
            for _ in range(10_000):
                sys.stderr.write("inside\n")
            sys.stdout.write("in memory")
        assert sys.stderr is stream
        assert drained(reader).startswith(b"before\ninside\n")
        assert in_memory.getvalue() == "in memory"
