"""Gateways in processes of their own, killed in the middle of a batch: no line is lost, and none comes twice."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import httpx
import pytest

from tests.serving.gateway import fake_worker
from tests.serving.gateway.batches.asking import create, ended, line, rows, upload
from tests.serving.gateway.conftest import MODEL_NAME
from tests.serving.gateway.fake_worker import FakeWorker, expected_tokens

MAX_OPEN = 8 + 2  # lines in the worker at once: its slots, and two more
MAX_TOKENS = 3


@asynccontextmanager
async def a_gateway(port: int, folder: Path, model: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The process and its URL. It is killed at the end of the block."""
    settings = {
        "model.path": model,
        "model.name": MODEL_NAME,
        "gateway.port": 0,
        "gateway.grpc_port": 0,
        "gateway.workers": f'["127.0.0.1:{port}"]',
        "batches.path": folder,
    }
    argv = [sys.executable, "-m", "moonshard.serving.cli", "gateway"]
    for key, value in settings.items():
        argv += ["--set", f"{key}={value}"]
    process = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.PIPE)
    try:
        assert process.stderr is not None
        said = (await process.stderr.readline()).decode()
        assert "listening" in said, said
        yield process, next(word.removeprefix("http=") for word in said.split() if word.startswith("http="))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=60)


def lines(number: int) -> list[bytes]:
    body = {"max_tokens": MAX_TOKENS, "return_token_ids": True}
    return [
        b"{broken" if index % 50 == 49 else line(str(index), body=body | {"prompt": [index % 999, 5]})
        for index in range(number)
    ]


async def check(http: httpx.AsyncClient, batch: dict, number: int) -> None:
    """Each line has one row, with the answer that its prompt has."""
    num_broken = number // 50
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": number, "completed": number - num_broken, "failed": num_broken}
    found = await rows(http, batch["output_file_id"])
    assert [row["custom_id"] for row in found] == [str(index) for index in range(number) if index % 50 != 49]
    for row in found:
        [choice] = row["response"]["body"]["choices"]
        assert choice["token_ids"] == expected_tokens([int(row["custom_id"]) % 999, 5], MAX_TOKENS)
    broken = await rows(http, batch["error_file_id"])
    assert [row["error"]["line"] for row in broken] == [50 * index + 50 for index in range(num_broken)]


async def run_killed(worker: FakeWorker, folder: Path, model: Path, number: int, kill_after: list[int]) -> None:
    """A batch of so many lines, whose gateway is killed each time that the worker got so many more requests."""
    async with fake_worker.serving(worker) as port:
        async with a_gateway(port, folder, model) as (_, url), client(url) as http:
            batch = (await create(http, await upload(http, lines(number)))).json()
            await worker.seen(kill_after[0])
            seen = (await http.get(f"/v1/batches/{batch['id']}")).json()["request_counts"]
        for num_more in kill_after[1:]:
            num_before = len(worker.runs)
            async with a_gateway(port, folder, model) as (_, url), client(url) as http:
                counts = (await http.get(f"/v1/batches/{batch['id']}")).json()["request_counts"]
                assert counts["completed"] >= seen["completed"]  # what was told is never taken back
                await worker.seen(num_before + num_more)
                seen = (await http.get(f"/v1/batches/{batch['id']}")).json()["request_counts"]
        async with a_gateway(port, folder, model) as (process, url), client(url) as http:
            await check(http, await ended(http, batch["id"]), number)
            assert list((folder / "parts").iterdir()) == []
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    num_asked = number - number // 50
    assert num_asked <= len(worker.runs) <= num_asked + len(kill_after) * (MAX_OPEN + 50)


@pytest.mark.timeout(240)
async def test_a_batch_whose_gateway_is_killed_goes_on_by_itself(
    worker: FakeWorker, batches_path: Path, kimi_folder: Path
):
    await run_killed(worker, batches_path, kimi_folder, 300, [1, 40, 90])


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_ten_thousand_lines_outlive_ten_kills(worker: FakeWorker, batches_path: Path, kimi_folder: Path):
    random = Random(0)
    await run_killed(worker, batches_path, kimi_folder, 10_000, [random.randrange(1, 900) for _ in range(10)])


async def test_a_gateway_that_is_asked_to_end_finishes_the_lines_that_run_and_leaves_the_rest(
    worker: FakeWorker, batches_path: Path, kimi_folder: Path
):
    worker.script.points.hold("step 1")  # each has its first token by then: none is begun while others wait for theirs
    async with fake_worker.serving(worker) as port:
        async with a_gateway(port, batches_path, kimi_folder) as (process, url), client(url) as http:
            batch = (await create(http, await upload(http, lines(30)))).json()
            await worker.seen(MAX_OPEN)
            process.send_signal(signal.SIGTERM)
            while (await http.get("/ready")).status_code == 200:
                pass
            worker.script.points.release()
            assert await process.wait() == 0
        assert len(worker.runs) == MAX_OPEN
        async with a_gateway(port, batches_path, kimi_folder) as (_, url), client(url) as http:
            await check(http, await ended(http, batch["id"]), 30)
    assert len(worker.runs) == 30


async def test_two_gateways_do_not_share_a_folder(worker: FakeWorker, batches_path: Path, kimi_folder: Path):
    async with fake_worker.serving(worker) as port, a_gateway(port, batches_path, kimi_folder):
        argv = ["-m", "moonshard.serving.cli", "gateway", "--set", f"model.path={kimi_folder}"]
        argv += ["--set", "gateway.port=0", "--set", "gateway.grpc_port=0", "--set", f"batches.path={batches_path}"]
        second = await asyncio.create_subprocess_exec(sys.executable, *argv, stderr=asyncio.subprocess.PIPE)
        _, said = await second.communicate()
        assert (second.returncode, b"batches.path" in said) == (2, True), said
