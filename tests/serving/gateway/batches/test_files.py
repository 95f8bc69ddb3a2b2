"""Files over real HTTP: uploads in any shape, and who may see what came of them."""

import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.rpc.status import InvalidArgument
from moonshard.serving.config.keys import BatchesConfig, GatewayConfig
from moonshard.serving.config.tenants import hash_key
from moonshard.serving.gateway.intake.multipart import FormReader, PartBegun, PartBytes, boundary_of
from moonshard.serving.gateway.process import RunningGateway
from tests.serving.gateway.batches.asking import create, ended, line, upload
from tests.serving.gateway.batches.conftest import a_gateway
from tests.serving.gateway.fake_worker import FakeWorker

CONTENT = bytes(range(256)) * 2000  # with line ends and beginnings of boundaries
BOUNDARY = "b0"
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def form(*parts: tuple[str, bytes], end: str = f"--{BOUNDARY}--\r\n") -> bytes:
    said = [f"--{BOUNDARY}\r\ncontent-disposition: form-data; {head}\r\n\r\n".encode() + body for head, body in parts]
    return b"".join(each + b"\r\n" for each in said) + end.encode()


PURPOSE = ('name="purpose"', b"batch")
FILE = ('name="file"; filename="a.jsonl"', b"{}")


async def test_a_file_comes_back_as_it_was_sent(http: httpx.AsyncClient, batches_path: Path):
    files = {"file": ("Zürich.jsonl", CONTENT)}
    made = (await http.post("/v1/files", files=files, data={"purpose": "batch"})).json()
    shape = (made["object"], made["bytes"], made["filename"], made["purpose"], made["status"])
    assert shape == ("file", len(CONTENT), "Zürich.jsonl", "batch", "processed")
    assert (await http.get(f"/v1/files/{made['id']}")).json() == made
    assert (await http.get(f"/v1/files/{made['id']}/content")).content == CONTENT
    assert (await http.get("/v1/files")).json()["data"] == [made]
    assert (await http.delete(f"/v1/files/{made['id']}")).json()["deleted"] is True
    for path in (f"/v1/files/{made['id']}", f"/v1/files/{made['id']}/content"):
        assert (await http.get(path)).status_code == 404
    assert [path.name for path in (batches_path / "files").iterdir()] == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (form(FILE), "purpose"),
        (form(PURPOSE), "file"),
        (form(FILE, ('name="purpose"', b"fine-tune")), "purpose"),
        (form(PURPOSE, FILE, FILE), "file"),
        (form(PURPOSE, FILE, ('name="expires_after[seconds]"', b"3600")), "expires_after[seconds]"),
        (form(('name="purpose"', b"x" * 5000), FILE), "purpose"),
        (form(PURPOSE, ('nome="file"', b"")), None),
        (form(PURPOSE, FILE, end=""), None),
        (b"no form at all", None),
        (form(('name="' + "x" * 20_000 + '"', b"")), None),
    ],
)
async def test_an_upload_that_is_none_is_refused_and_leaves_nothing(
    body: bytes, param: str | None, http: httpx.AsyncClient, batches_path: Path
):
    response = await http.post("/v1/files", content=body, headers=FORM)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert [*(batches_path / "parts").iterdir(), *(batches_path / "files").iterdir()] == []


@pytest.mark.parametrize("content_type", ["application/json", "multipart/form-data", "multipart/form-data; boundary="])
async def test_a_body_that_is_no_form_is_refused_by_its_type(content_type: str, http: httpx.AsyncClient):
    response = await http.post("/v1/files", content=form(PURPOSE, FILE), headers={"content-type": content_type})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "content-type")


async def test_files_are_listed_in_pages_by_purpose_and_order(http: httpx.AsyncClient):
    made = [await upload(http, [line(str(number))]) for number in range(3)]
    for order, wanted in (("asc", made), ("desc", made[::-1])):
        first = (await http.get("/v1/files", params={"order": order, "limit": 2})).json()
        rest = (await http.get("/v1/files", params={"order": order, "after": first["last_id"]})).json()
        assert [each["id"] for each in (*first["data"], *rest["data"])] == wanted
    assert (await http.get("/v1/files", params={"purpose": "batch_output"})).json()["data"] == []
    assert (await http.get("/v1/files", params={"order": "up"})).status_code == 400


@given(
    content=st.binary(max_size=60).map(lambda said: said.replace(b"\r\n--b0", b"")) | st.just(b"\r\n--b\r\n--b1--"),
    cuts=st.lists(st.integers(0, 200)),
)
def test_a_form_is_read_alike_however_it_is_cut(content: bytes, cuts: list[int]):
    body = form(('name="file"; filename="f"', content), PURPOSE) + b"epilogue"
    places = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    reader, found, last = FormReader(BOUNDARY.encode()), {}, ""
    for start, end in itertools.pairwise(places):
        for event in reader.pieces(body[start:end]):
            match event:
                case PartBegun(name, _):
                    found[name] = b""
                    last = name
                case PartBytes(said):
                    found[last] += said
    reader.finish()
    assert found == {"file": content, "purpose": b"batch"}


@given(st.binary(max_size=300))
def test_any_other_body_is_read_or_refused_and_nothing_else(said: bytes):
    reader = FormReader(BOUNDARY.encode())
    try:
        list(reader.pieces(b"--b0\r\n" + said))
        reader.finish()
    except InvalidArgument:
        pass


def test_a_boundary_may_be_quoted():
    assert boundary_of('multipart/form-data; boundary="a b"') == b"a b"


# ---- tenants


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, dict[str, str]]:
    return {name: {"authorization": f"Bearer key-{name}"} for name in ("one", "other")}


@pytest.fixture
async def with_tenants(
    keys: dict[str, dict[str, str]],
    tmp_path: Path,
    worker: FakeWorker,
    gateway_config: GatewayConfig,
    batches_config: BatchesConfig,
    model_path: Path,
) -> AsyncIterator[httpx.AsyncClient]:
    path = tmp_path / "keys.toml"
    path.write_text("[keys]\n" + "".join(f'{hash_key(f"key-{name}")} = "{name}"\n' for name in keys))
    config = replace(gateway_config, keys=path)
    async with (
        a_gateway(worker, config, batches_config, model_path) as running,
        httpx.AsyncClient(base_url=running.http, trust_env=False) as http,
    ):
        yield http


async def test_a_tenant_sees_its_own_files_and_batches_alone(
    with_tenants: httpx.AsyncClient, keys: dict[str, dict[str, str]]
):
    http, one, other = with_tenants, keys["one"], keys["other"]
    file_id = await upload(http, [line("a")], **one)
    batch = (await create(http, file_id, headers=one)).json()
    done = await ended(http, batch["id"], **one)
    assert done["request_counts"]["completed"] == 1
    paths = [f"/v1/batches/{batch['id']}"]
    paths += [f"/v1/files/{each}{end}" for each in (file_id, done["output_file_id"]) for end in ("", "/content")]
    for path in paths:
        assert (await http.get(path, headers=one)).status_code == 200
        assert (await http.get(path, headers=other)).status_code == 404
        assert (await http.get(path)).status_code == 401
    assert (await http.post(f"/v1/batches/{batch['id']}/cancel", headers=other)).status_code == 404
    assert (await http.delete(f"/v1/files/{file_id}", headers=other)).status_code == 404
    assert (await create(http, file_id, headers=other)).status_code == 404
    for path in ("/v1/files", "/v1/batches"):
        assert (await http.get(path, headers=other)).json()["data"] == []


async def test_a_name_of_a_tenant_is_no_key(with_tenants: httpx.AsyncClient):
    assert (await with_tenants.get("/v1/files", headers={"authorization": "Bearer one"})).status_code == 401


class TestOff:
    @pytest.fixture
    def batches_config(self) -> BatchesConfig:
        return BatchesConfig()

    async def test_without_a_folder_each_route_names_the_key_that_brings_it(self, http: httpx.AsyncClient):
        for method, path in (("POST", "/v1/files"), ("GET", "/v1/batches"), ("POST", "/v1/batches/x/cancel")):
            response = await http.request(method, path)
            error = response.json()["error"]
            assert (response.status_code, "batches.path" in error["message"]) == (404, True)


async def test_a_client_that_leaves_while_it_sends_leaves_nothing(running: RunningGateway, batches_path: Path):
    async def begun():
        yield form(PURPOSE)[:-10] + b"\r\n"
        raise ConnectionResetError

    async with httpx.AsyncClient(base_url=running.http, trust_env=False) as http:
        with pytest.raises(ConnectionResetError):
            await http.post("/v1/files", content=begun(), headers=FORM)
        assert (await http.get("/v1/files")).json()["data"] == []
    assert list((batches_path / "files").iterdir()) == []
