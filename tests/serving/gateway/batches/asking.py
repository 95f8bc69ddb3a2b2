"""What tests of batches ask over HTTP."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import httpx

from tests.serving.gateway.conftest import MODEL_NAME

ENDED = ("completed", "failed", "expired", "cancelled")
POLL_S = 0.02


def line(custom_id: object, body: object = None, **changes: object) -> bytes:
    asked = {"model": MODEL_NAME, "prompt": [1, 2, 3], "max_tokens": 4} if body is None else body
    said = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": asked} | changes
    return json.dumps({name: value for name, value in said.items() if value is not ...}).encode()


async def upload(http: httpx.AsyncClient, lines: Iterable[bytes], **headers: str) -> str:
    form = {"files": {"file": ("lines.jsonl", b"\n".join(lines))}, "data": {"purpose": "batch"}}
    response = await http.post("/v1/files", **form, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()["id"]


async def create(http: httpx.AsyncClient, file_id: str, *, headers: dict[str, str] | None = None, **changes: Any):
    asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"} | changes
    return await http.post("/v1/batches", json=asked, headers=headers)


async def ended(http: httpx.AsyncClient, batch_id: str, **headers: str) -> dict[str, Any]:
    """The batch once it has ended: the API has no other way to learn of that than to ask."""
    while (batch := (await http.get(f"/v1/batches/{batch_id}", headers=headers)).json())["status"] not in ENDED:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    return batch


async def run(http: httpx.AsyncClient, lines: Iterable[bytes], **changes: Any) -> dict[str, Any]:
    created = await create(http, await upload(http, lines), **changes)
    assert created.status_code == 200, created.text
    return await ended(http, created.json()["id"])


async def rows(http: httpx.AsyncClient, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    response = await http.get(f"/v1/files/{file_id}/content")
    assert response.status_code == 200, response.text
    return [json.loads(row) for row in response.text.splitlines()]
