"""Answers that are kept: for their tenant alone, up to the bounds, and no longer than it wants."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.rpc.status import NotFound
from moonshard.serving.config.keys import GatewayConfig
from moonshard.serving.config.tenants import Tenant, hash_key
from moonshard.serving.gateway.openai.messages import Message
from moonshard.serving.gateway.responses.stored import Stored, StoredResponses
from tests.serving.gateway.fake_worker import FakeWorker

URL = "/v1/responses"
ASKED: Any = {"input": "hi", "max_output_tokens": 3}
TENANTS = (Tenant("a"), Tenant("b"))


@pytest.fixture
def gateway_config(gateway_config: GatewayConfig, tmp_path: Path) -> GatewayConfig:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[keys]\n{hash_key("one")} = "a"\n{hash_key("two")} = "b"\n')
    return replace(gateway_config, keys=keys)


@pytest.fixture
def ours() -> dict[str, str]:
    return {"authorization": "Bearer one"}


@pytest.fixture
def theirs() -> dict[str, str]:
    return {"x-api-key": "two"}


async def test_an_answer_is_kept_until_it_is_deleted(http: httpx.AsyncClient, ours: dict[str, str]):
    whole = (await http.post(URL, json=ASKED, headers=ours)).json()
    place = f"{URL}/{whole['id']}"
    assert (await http.get(place, headers=ours)).json() == whole
    streamed = await http.get(place, params={"stream": "true"}, headers=ours)
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "stream")
    deleted = await http.delete(place, headers=ours)
    assert deleted.json() == {"id": whole["id"], "object": "response", "deleted": True}
    for gone in (await http.get(place, headers=ours), await http.delete(place, headers=ours)):
        assert (gone.status_code, gone.json()["error"]["param"]) == (404, "id")


async def test_what_another_tenant_has_or_nobody_kept_does_not_exist(
    http: httpx.AsyncClient, worker: FakeWorker, ours: dict[str, str], theirs: dict[str, str]
):
    kept = (await http.post(URL, json=ASKED, headers=ours)).json()
    unkept = (await http.post(URL, json=ASKED | {"store": False}, headers=ours)).json()
    assert (kept["store"], unkept["store"]) == (True, False)
    for response_id, headers in ((kept["id"], theirs), (unkept["id"], ours), ("resp_none", ours)):
        asked = ASKED | {"previous_response_id": response_id}
        refused = await http.post(URL, json=asked, headers=headers)
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "previous_response_id")
        assert (await http.get(f"{URL}/{response_id}", headers=headers)).status_code == 404
        assert (await http.delete(f"{URL}/{response_id}", headers=headers)).status_code == 404
    assert len(worker.runs) == 2
    assert (await http.post(URL, json=ASKED | {"previous_response_id": kept["id"]}, headers=ours)).status_code == 200
    assert (await http.get(f"{URL}/{kept['id']}")).status_code == 401


async def test_one_exchange_id_for_all_requests_makes_no_two_answers_one(http: httpx.AsyncClient, ours: dict[str, str]):
    headers = ours | {"x-request-id": "mine/1"}
    first, second = [(await http.post(URL, json=ASKED, headers=headers)).json() for _ in range(2)]
    assert first["id"] != second["id"]
    assert (await http.get(f"{URL}/{first['id']}", headers=ours)).json() == first


def stored(text: str = "") -> Stored:
    return Stored(text.encode(), (Message(role="user", content=text),))


@given(st.lists(st.tuples(st.sampled_from(["keep", "get", "delete"]), st.integers(0, 1), st.integers(0, 4))))
def test_of_each_tenant_the_least_recently_used_is_dropped(steps: list[tuple[str, int, int]]):
    kept, expected = StoredResponses(3, 1 << 20), ([], [])
    for step, number, name in steps:
        tenant, ids, response_id = TENANTS[number], expected[number], f"resp_{name}"
        is_kept = response_id in ids
        if step == "keep" and not is_kept:
            kept.keep(tenant, response_id, stored())
        elif not is_kept:
            with pytest.raises(NotFound, match=r"^id: "):
                (kept.delete if step == "delete" else kept.get)(tenant, response_id, field="id")
            continue
        else:
            (kept.delete if step == "delete" else kept.get)(tenant, response_id, field="id")
            ids.remove(response_id)
        if step != "delete":
            ids.append(response_id)
        del ids[:-3]


def test_bytes_are_bounded_and_what_alone_is_too_large_is_not_kept():
    kept = StoredResponses(100, 11_000)  # three of some 3,600
    for number in range(5):
        kept.keep(TENANTS[0], f"resp_{number}", stored("x" * 1_500))
    for number, is_kept in enumerate((False, False, True, True, True)):
        if is_kept:
            kept.get(TENANTS[0], f"resp_{number}", field="id")
        else:
            with pytest.raises(NotFound):
                kept.get(TENANTS[0], f"resp_{number}", field="id")
    kept.keep(TENANTS[1], "resp_large", stored("x" * 11_000))
    with pytest.raises(NotFound):
        kept.get(TENANTS[1], "resp_large", field="id")
    kept.get(TENANTS[0], "resp_4", field="id")
