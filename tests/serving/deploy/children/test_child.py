"""A child process whose reader is stopped: the test plays the supervisor, and its event loop stands still meanwhile."""

import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moonshard.serving.deploy.children.child import start_child
from moonshard.serving.deploy.status_pipe import StatusWriter

READ_WITHIN_S = 60.0

# What a worker does: it logs, its libraries write to the descriptor, it tells its status. Each is far more than a pipe
# holds, and only when all is done does it say so, where somebody listens.
NOISY = """
import os, sys
from moonshard.serving.config.reading import load_config
from moonshard.serving.deploy.startup import ProcessStart, run_process
from moonshard.serving.deploy.timings import Timings
path, _, fd = sys.argv[1:]
async def run(config, *, status, start):
    for number in range(20_000):
        sys.stderr.write(f"line {number}\\n")
        status("progress", {"message": f"loading {number}/20000"})
    for _ in range(100):
        try:
            os.write(2, b"a library\\n" * 1000)
        except BlockingIOError:
            pass
    status("ready", {})
    with open(path, "w") as fifo:
        fifo.write("went on")
    with open(path) as fifo:
        fifo.read()  # until it is read
    sys.stderr.write("the last line\\n")
    return 0
raise SystemExit(run_process(lambda: run, load_config(None), int(fd), ProcessStart(timings=Timings())))
"""


def read_all(fifo: Path) -> str:
    """Blocks, and the event loop with it."""
    return fifo.read_text()


async def test_a_child_goes_on_while_nobody_reads_what_it_says(tmp_path: Path):
    os.mkfifo(fifo := tmp_path / "fifo")
    events: list[tuple[str, dict[str, object]]] = []
    lines: list[str] = []
    is_ready = asyncio.Event()

    def on_event(event: str, fields: dict[str, object]) -> None:
        events.append((event, fields))
        if event == "ready":
            is_ready.set()

    argv = [sys.executable, "-c", NOISY, str(fifo)]
    child = await start_child(argv, on_event=on_event, on_line=lines.append)
    assert read_all(fifo) == "went on"  # until then nothing was read
    assert events == []
    await is_ready.wait()  # now there is room
    await asyncio.to_thread(fifo.write_text, "")
    assert await child.wait() == 0
    assert lines[-1] == "the last line"
    assert "found no room here and were dropped" in lines[-2]
    assert events[-2:] == [("progress", {"message": "loading 19999/20000"}), ("ready", {})]


def test_status_that_finds_no_room_is_kept_in_order_but_for_progress_that_is_old():
    reader, writer = os.pipe()
    status = StatusWriter(writer)
    num_filling = 0
    while not status.num_waiting:
        status("listening", {"number": num_filling})
        num_filling += 1
    for number in range(1000):
        status("progress", {"message": str(number)})
    status("ready", {})
    with os.fdopen(reader, "rb") as source:
        told = [source.readline() for _ in range(num_filling + 2)]
    os.close(writer)
    assert b'"number":%d}' % (num_filling - 1) in told[-3]
    assert b'"999"' in told[-2]
    assert b'"ready"' in told[-1]


def test_at_the_end_status_is_waited_for_while_somebody_reads_it_and_no_longer():
    reader, writer = os.pipe()
    status = StatusWriter(writer)
    while status.num_waiting < 100:
        status("listening", {})
    status.finish(0.01)  # nobody reads
    assert status.num_waiting
    with ThreadPoolExecutor() as pool, os.fdopen(reader, "rb") as source:
        reading = pool.submit(source.read)
        status.finish(READ_WITHIN_S)
        assert not status.num_waiting
        status.close()
        assert reading.result().endswith(b'{"event":"listening"}\n')
