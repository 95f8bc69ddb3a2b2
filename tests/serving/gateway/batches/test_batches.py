"""Batches over real HTTP: what their lines become, and who may see them."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from moonshard.rpc import link_pb2
from moonshard.serving.config.keys import BatchesConfig, GatewayConfig
from moonshard.serving.control.request import BACKGROUND
from moonshard.serving.gateway.batches.api import requests
from moonshard.serving.gateway.process import RunningGateway
from tests.serving.gateway.batches.asking import create, ended, line, rows, run, upload
from tests.serving.gateway.batches.conftest import MAX_BYTES, a_gateway
from tests.serving.gateway.conftest import MODEL_NAME
from tests.serving.gateway.fake_worker import FakeWorker, expected_tokens

PROMPT = [1, 2, 3]
ASKED = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 4}


async def test_each_line_is_answered_as_its_route_answers(http: httpx.AsyncClient, running: RunningGateway):
    batch = await run(http, [line(str(number)) for number in range(20)], metadata={"a": "b"})
    assert (batch["status"], batch["metadata"], batch["error_file_id"]) == ("completed", {"a": "b"}, None)
    assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    found = await rows(http, batch["output_file_id"])
    assert [row["custom_id"] for row in found] == [str(number) for number in range(20)]
    alone = (await http.post("/v1/completions", json=ASKED)).json()
    for row in found:
        assert (row["error"], row["response"]["status_code"]) == (None, 200)
        body = row["response"]["body"]
        assert body["choices"] == alone["choices"]
        assert body["id"] == f"cmpl-{row['response']['request_id']}"
    stamps = [batch[f"{name}_at"] for name in ("created", "in_progress", "finalizing", "completed")]
    assert stamps == sorted(stamps)


BROKEN = {
    "no json": (b'{"custom_id": "x",', None, "invalid_json_line"),
    "no object": (b"[1]", None, "missing_required_parameter"),
    "no utf-8": (b'{"custom_id": "\xff"}', None, "invalid_json_line"),
    "no id": (line(...), None, "missing_required_parameter"),
    "an empty id": (line(""), "", "missing_required_parameter"),
    "a number for an id": (line(3), None, "missing_required_parameter"),
    "a long id": (line("x" * 513), "x" * 512, "invalid_custom_id"),
    "an id that came before": (line("good"), "good", "duplicate_custom_id"),
    "another method": (line("m", method="GET"), "m", "invalid_method"),
    "another route": (line("u", url="/v1/models"), "u", "mismatched_endpoint"),
    "a body that is none": (line("b", body=[1]), "b", "invalid_body"),
    "no body": (line("n", body=...), "n", "missing_required_parameter"),
    "a stream": (line("s", body=ASKED | {"stream": True}), "s", "invalid_body"),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_line_is_a_row_of_the_error_file_and_the_others_run(name: str, http: httpx.AsyncClient):
    said, custom_id, code = BROKEN[name]
    batch = await run(http, [line("good"), said, b"", line("better")])
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert [row["custom_id"] for row in await rows(http, batch["output_file_id"])] == ["good", "better"]
    [row] = await rows(http, batch["error_file_id"])
    assert (row["custom_id"], row["response"], row["error"]["code"], row["error"]["line"]) == (custom_id, None, code, 2)


async def test_what_a_route_refuses_is_a_row_with_its_answer(http: httpx.AsyncClient):
    refused = [{"temperature": -1}, {"priority": 2**40}, {"prompt": [10**6]}, {"model": "another"}, {"audio": {}}]
    batch = await run(http, [line("good"), *(line(str(n), body=ASKED | each) for n, each in enumerate(refused))])
    assert batch["request_counts"] == {"total": 6, "completed": 1, "failed": 5}
    found = await rows(http, batch["error_file_id"])
    assert [row["response"]["status_code"] for row in found] == [400, 400, 400, 404, 400]
    params = [row["response"]["body"]["error"]["param"] for row in found]
    assert params == ["temperature", "priority", "prompt", "model", "audio"]


async def test_a_file_without_a_line_that_can_be_run_fails_with_what_is_wrong_with_each(http: httpx.AsyncClient):
    for lines, errors in (
        ([b""], [("empty_file", None)]),
        ([b"{", line("a", method="PUT")], [("invalid_json_line", 1), ("invalid_method", 2)]),
    ):
        batch = await run(http, lines)
        assert (batch["status"], batch["output_file_id"]) == ("failed", None)
        assert [(error["code"], error["line"]) for error in batch["errors"]["data"]] == errors


async def test_a_file_with_too_many_lines_fails(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("moonshard.serving.gateway.batches.lines.MAX_LINES", 3)
    batch = await run(http, [line(str(number)) for number in range(5)])
    assert [error["code"] for error in batch["errors"]["data"]] == ["too_many_lines"]


async def test_lines_come_behind_every_other_request_and_keep_their_own_order(
    http: httpx.AsyncClient, worker: FakeWorker
):
    await run(http, [line("a", body=ASKED | {"priority": -5}), line("b")])
    await http.post("/v1/completions", json=ASKED | {"priority": 2**31 - 1})
    assert [run.priority for run in worker.runs] == [BACKGROUND - 5, BACKGROUND, 2**31 - 1]


async def test_no_line_is_begun_while_others_have_every_slot(http: httpx.AsyncClient, worker: FakeWorker):
    worker.script.points.hold("step 1")  # then they run, and wait
    worker.script.may_step.set()
    num_others = worker.welcome.max_slots + 2
    others = [asyncio.create_task(http.post("/v1/completions", json=ASKED)) for _ in range(num_others)]
    await worker.seen(num_others)
    created = (await create(http, await upload(http, [line("a")]))).json()
    while (await http.get(f"/v1/batches/{created['id']}")).json()["status"] == "validating":  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert len(worker.runs) == num_others
    worker.script.points.release()
    await asyncio.gather(*others)
    assert (await ended(http, created["id"]))["status"] == "completed"


async def test_a_line_that_a_worker_refuses_for_want_of_room_is_asked_again(
    http: httpx.AsyncClient, worker: FakeWorker
):
    worker.script.failure = link_pb2.Failed(code=8, message="the queue is full", retry_after_s=1.0)
    created = (await create(http, await upload(http, [line("a")]))).json()
    await worker.seen(1)
    worker.script.failure = None
    batch = await ended(http, created["id"])
    assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
    assert "moonshard_batch_retries_total 1.0" in (await http.get("/metrics")).text


async def test_a_line_for_which_there_is_no_worker_waits_for_one(
    http: httpx.AsyncClient, worker: FakeWorker, running: RunningGateway
):
    worker.send_load(draining=True)
    await running.gateway.pool.wait_not_ready()
    created = (await create(http, await upload(http, [line("a")]))).json()
    worker.send_load(draining=False)
    batch = await ended(http, created["id"])
    assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


async def test_a_cancelled_batch_has_what_was_answered_and_a_row_for_every_other_line(
    http: httpx.AsyncClient, worker: FakeWorker
):
    worker.script.max_tokens_sent = 2
    created = (await create(http, await upload(http, [line(str(number)) for number in range(30)]))).json()
    await worker.seen(1)
    cancelling = await http.post(f"/v1/batches/{created['id']}/cancel")
    assert cancelling.json()["status"] in ("cancelling", "cancelled")
    batch = await ended(http, created["id"])
    assert (batch["status"], batch["output_file_id"]) == ("cancelled", None)
    assert batch["request_counts"] == {"total": 30, "completed": 0, "failed": 30}
    found = await rows(http, batch["error_file_id"])
    assert [row["custom_id"] for row in found] == [str(number) for number in range(30)]
    assert {row["error"]["code"] for row in found} == {"batch_cancelled"}
    while worker.num_running:  # noqa: ASYNC110  # its tasks have no event each
        await asyncio.sleep(0.01)
    again = await http.post(f"/v1/batches/{created['id']}/cancel")
    assert again.json()["status"] == "cancelled"


async def test_a_batch_whose_results_have_no_room_fails_with_what_there_is(
    worker: FakeWorker, gateway_config: GatewayConfig, batches_path: Path, model_path: Path
):
    lines = [line(str(number)) for number in range(40)]
    config = BatchesConfig(path=batches_path, max_bytes=len(b"\n".join(lines)) + 3000)
    async with (
        a_gateway(worker, gateway_config, config, model_path) as running,
        httpx.AsyncClient(base_url=running.http, trust_env=False) as http,
    ):
        batch = await run(http, lines)
        assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "storage_full")
        counts = batch["request_counts"]
        assert 0 < counts["completed"] < 40
        assert counts["completed"] + counts["failed"] == 40
        assert (await http.get(f"/v1/files/{batch['output_file_id']}")).status_code == 200


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"a": 1}}, None),
        ({"output_expires_after": {"anchor": "created_at"}}, "output_expires_after"),
        ({"input_file_id": "file-none"}, "input_file_id"),
    ],
)
async def test_a_request_for_a_batch_is_refused_by_the_field_at_fault(
    changes: dict[str, Any], param: str | None, http: httpx.AsyncClient
):
    response = await create(http, await upload(http, [line("a")]), **changes)
    assert response.status_code == (404 if param == "input_file_id" else 400)
    assert param is None or response.json()["error"]["param"] == param


async def test_batches_are_listed_in_pages_the_newest_first(http: httpx.AsyncClient):
    file_id = await upload(http, [line("a")])
    made = [(await create(http, file_id)).json()["id"] for _ in range(5)]
    first = (await http.get("/v1/batches", params={"limit": 3})).json()
    second = (await http.get("/v1/batches", params={"limit": 3, "after": first["last_id"]})).json()
    assert [each["id"] for each in (*first["data"], *second["data"])] == made[::-1]
    assert (first["has_more"], second["has_more"]) == (True, False)
    for limit in ("0", "101", "x"):
        assert (await http.get("/v1/batches", params={"limit": limit})).status_code == 400


async def test_metrics_count_lines_and_batches(http: httpx.AsyncClient):
    await run(http, [line("a"), b"{"])
    told = (await http.get("/metrics")).text
    assert 'moonshard_batches_total{status="completed"} 1.0' in told
    assert 'moonshard_batch_lines_total{outcome="completed"} 1.0' in told


async def test_a_file_that_a_batch_reads_cannot_be_deleted(http: httpx.AsyncClient, worker: FakeWorker):
    worker.script.max_tokens_sent = 1
    file_id = await upload(http, [line("a")])
    batch = (await create(http, file_id)).json()
    refused = await http.delete(f"/v1/files/{file_id}")
    assert (refused.status_code, batch["id"] in refused.text) == (400, True)
    await http.post(f"/v1/batches/{batch['id']}/cancel")
    await ended(http, batch["id"])
    assert (await http.delete(f"/v1/files/{file_id}")).json() == {"id": file_id, "object": "file", "deleted": True}
    assert (await http.get(f"/v1/files/{file_id}")).status_code == 404


async def test_an_answer_is_the_one_that_the_prompt_has(http: httpx.AsyncClient):
    prompts = [[n, n + 1] for n in range(10)]
    lines = [line(str(n), body=ASKED | {"prompt": p, "return_token_ids": True}) for n, p in enumerate(prompts)]
    found = await rows(http, (await run(http, lines))["output_file_id"])
    told = [row["response"]["body"]["choices"][0]["token_ids"] for row in found]
    assert told == [expected_tokens(prompt, 4) for prompt in prompts]


async def test_every_endpoint_is_served(http: httpx.AsyncClient):
    said = [{"role": "user", "content": "hi"}]
    for endpoint, body in (
        ("/v1/chat/completions", {"messages": said, "max_tokens": 3}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 3}),
        ("/v1/messages", {"messages": said, "max_tokens": 3}),
    ):
        batch = await run(http, [line("a", body=body, url=endpoint)], endpoint=endpoint)
        assert batch["request_counts"]["completed"] == 1, await rows(http, batch["error_file_id"])


async def test_a_store_has_room_for_so_many_bytes_and_no_more(http: httpx.AsyncClient):
    form = {"data": {"purpose": "batch"}, "files": {"file": ("a", b"x" * (MAX_BYTES + 1))}}
    refused = await http.post("/v1/files", **form)
    assert (refused.status_code, "batches.max_bytes" in refused.text) == (413, True)
    await upload(http, [b"x" * (MAX_BYTES - 10)])
    form["files"]["file"] = ("a", b"x" * 11)
    assert (await http.post("/v1/files", **form)).status_code == 413
    [only] = (await http.get("/v1/files")).json()["data"]
    await http.delete(f"/v1/files/{only['id']}")
    await upload(http, [b"x" * MAX_BYTES])


async def test_lines_that_have_not_run_in_time_have_a_row_that_says_so(
    http: httpx.AsyncClient, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(requests, "_UNIT_S", {"m": 1})  # a second each
    worker.script.max_tokens_sent = 1
    batch = await run(http, [line(str(number)) for number in range(3)], completion_window="1m")
    assert (batch["status"], batch["output_file_id"]) == ("expired", None)
    assert batch["request_counts"] == {"total": 3, "completed": 0, "failed": 3}
    found = await rows(http, batch["error_file_id"])
    assert [(row["custom_id"], row["error"]["code"]) for row in found] == [(str(n), "batch_expired") for n in range(3)]
