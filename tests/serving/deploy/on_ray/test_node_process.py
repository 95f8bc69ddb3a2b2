"""What runs on a node, without Ray: the command with what only the node knows, its news, and its end with the actor."""

import os
import signal
import subprocess
import sys

from moonshard.serving.deploy.on_ray.node_process import MAX_BATCH_BYTES, MAX_LINE, NodeProcess
from moonshard.serving.deploy.on_ray.orders import KEY_FILE
from tests.serving.deploy.children.test_supervisor import has_ended

KEY = b"0123456789abcdef" * 2 + b"\n"


async def all_news(process: NodeProcess) -> list[tuple]:
    found: list[tuple] = []
    while not found or found[-1][0] != "ended":
        found += await process.news()
    return found


async def run(code: str, *arguments: str, environment: dict[str, str] | None = None) -> list[tuple]:
    process = NodeProcess()
    await process.start(["-ISc", code, *arguments], environment or {}, KEY.hex())
    return await all_news(process)


async def test_a_process_has_the_cluster_key_in_a_file_for_its_owner_alone_and_outside_every_folder():
    code = """
import os, sys
path = sys.argv[1].partition("=")[2]
with open(path, "rb") as file:
    print(file.read(), oct(os.fstat(file.fileno()).st_mode & 0o777), os.fstat(file.fileno()).st_nlink)
"""
    news = await run(code, f"cluster.key_file={KEY_FILE}")
    assert news == [("line", f"{KEY!r} 0o600 0"), ("ended", 0)]


async def test_it_has_the_variables_that_it_is_given(monkeypatch):
    monkeypatch.setenv("JAX_OF_THE_NODE", "kept")
    monkeypatch.delenv("JAX_GIVEN", raising=False)
    code = "import os; print(os.environ['JAX_GIVEN'], os.environ['JAX_OF_THE_NODE'])"
    try:
        assert (await run(code, environment={"JAX_GIVEN": "1"}))[0] == ("line", "1 kept")
    finally:
        os.environ.pop("JAX_GIVEN", None)


async def test_its_events_lines_and_exit_code_are_news():
    code = """
import os, sys
os.write(int(sys.argv[-1]), b'{"event": "listening", "address": "10.0.0.1:7"}\\n')
print("loading", flush=True)
sys.exit(3)
"""
    news = await run(code)
    assert sorted(news[:2]) == [("event", "listening", {"address": "10.0.0.1:7"}), ("line", "loading")]
    assert news[2:] == [("ended", 3)]


async def test_no_batch_of_news_is_so_large_that_ray_would_keep_it_as_an_object():
    process = NodeProcess()
    for number in range(200):
        process._on_line(f"{number} " + "\N{HIRAGANA LETTER A}" * 100_000)
    lines = list[str]()
    while len(lines) < 200:
        batch = await process.news()
        assert sum(len(str(said).encode()) for said in batch) <= MAX_BATCH_BYTES
        lines += [str(text) for _, text, *_ in batch]
    assert [line.split()[0] for line in lines] == [str(number) for number in range(200)]
    assert all(len(line) == MAX_LINE for line in lines)


async def test_a_signal_before_the_process_is_there_is_not_lost():
    process = NodeProcess()
    await process.signal(signal.SIGTERM)
    await process.start(["-ISc", "import signal; signal.pause()"], {}, KEY.hex())
    assert (await all_news(process))[-1] == ("ended", -signal.SIGTERM)


ACTOR = """
import asyncio, sys
from moonshard.serving.deploy.on_ray.node_process import NodeProcess
async def main():
    process = NodeProcess()
    await process.start(["-c", sys.argv[1]], {}, "00")
    while True:
        for kind, *said in await process.news():
            print(*said, flush=True)
asyncio.run(main())
"""

DRAINS = """
import os, signal, sys
from moonshard.serving.deploy.status_pipe import open_status_pipe
open_status_pipe(int(sys.argv[-1]))
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a worker does for as long as it drains
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""


def test_a_process_does_not_outlive_its_actor_not_even_to_drain():
    with subprocess.Popen([sys.executable, "-c", ACTOR, DRAINS], stdout=subprocess.PIPE, text=True) as actor:
        assert actor.stdout
        pid = int(actor.stdout.readline())
        actor.kill()
        assert has_ended(pid)
