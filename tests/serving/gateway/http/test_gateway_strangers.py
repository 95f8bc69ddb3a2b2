"""Pages of other sites reach a server on loopback only where that was allowed; other clients notice nothing."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import pytest

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc.status import InvalidArgument, PermissionDenied, RequestError, from_rpc_error
from moonshard.serving.config.keys import GatewayConfig
from moonshard.serving.gateway.grpc.front import SERVICE
from moonshard.serving.gateway.http.strangers import Strangers
from moonshard.serving.gateway.process import RunningGateway
from tests.serving.gateway.fake_worker import FakeWorker
from tests.serving.gateway.raw_http import connected, post

ASKED = {"model": "kimi", "prompt": [1, 2], "max_tokens": 4}
PAGE = "https://chat.example.com"
OTHER = "https://elsewhere.example"
PORT = 8000
OURS = [f"http://localhost:{PORT}", f"http://127.0.0.1:{PORT}", f"http://[::1]:{PORT}", f"https://localhost:{PORT}"]
LOOPBACK_HOSTS = [
    *("localhost", "LOCALHOST", "localhost.", "localhost:8000", "127.0.0.1", "127.1.2.3:80", "[::1]", "[::1]:8000"),
    *("chat.localhost", "chat.localhost:8000"),
]
OTHER_HOSTS = [
    *("", "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1"),
    *("0.0.0.0", "[::2]", "notlocalhost", "localhost:8000@evil.example", "localhost evil", "::1:"),
]
OTHER_ORIGINS = [
    *(OTHER, "null", "", "http://localhost:8001", "http://localhost", "https://127.0.0.1", "file://"),
    *("http://localhost.evil.example:8000", "http://evil.example:8000", "ftp://localhost:8000", "localhost:8000"),
]


def strangers(*origins: str, hosts: tuple[str, ...] = (), is_guarded: bool = True) -> Strangers:
    return Strangers(
        allowed_origins=frozenset(origins), allowed_hosts=frozenset(hosts), is_guarded=is_guarded, port=PORT
    )


def refusal(policy: Strangers, **headers: str | list[str]) -> type[RequestError] | None:
    values = {name: value if isinstance(value, list) else [value] for name, value in headers.items()}
    try:
        policy.check(lambda name: values.get(name, []))
    except RequestError as error:
        return type(error) if error.field in headers else RequestError
    return None


def test_on_loopback_without_keys_only_its_names_and_its_own_pages_get_through():
    guarded = strangers()
    assert [host for host in LOOPBACK_HOSTS if refusal(guarded, host=host)] == []
    assert [host for host in OTHER_HOSTS if refusal(guarded, host=host) is not PermissionDenied] == []
    host = f"localhost:{PORT}"
    assert [origin for origin in OURS if refusal(guarded, host=host, origin=origin)] == []
    assert [o for o in OTHER_ORIGINS if refusal(guarded, host=host, origin=o) is not PermissionDenied] == []
    assert refusal(guarded) is None  # HTTP/1.0 has no Host, and browsers have one


def test_what_is_allowed_gets_through_and_nothing_that_looks_like_it():
    guarded = strangers(PAGE, hosts=("box.example", "lab.example:80"))
    for host in ("box.example", "box.example:1234", "Box.Example", "lab.example:80", "localhost"):
        assert refusal(guarded, host=host) is None
    for host in ("lab.example", "lab.example:81", "a.box.example", "box.example.evil.example"):
        assert refusal(guarded, host=host) is PermissionDenied
    assert refusal(guarded, host="localhost", origin=PAGE) is None
    assert refusal(guarded, host="box.example:90", origin="http://box.example:90") is None  # a proxy's own page
    for origin in (PAGE + ":8443", "http://chat.example.com", PAGE + "/", "https://x.chat.example.com", "null"):
        assert refusal(guarded, host="localhost", origin=origin) is PermissionDenied
    assert refusal(strangers("*", hosts=("*",)), host="anything", origin=OTHER) is None


def test_with_keys_or_beyond_loopback_only_what_is_configured_is_checked():
    assert refusal(strangers(is_guarded=False), host="anything", origin=OTHER) is None
    by_host = strangers(hosts=("api.example",), is_guarded=False)
    assert refusal(by_host, host="anything") is PermissionDenied
    assert refusal(by_host, host="api.example", origin=OTHER) is None
    by_origin = strangers(PAGE, is_guarded=False)
    assert refusal(by_origin, host="anything", origin=OTHER) is PermissionDenied
    assert refusal(by_origin, host="api.example", origin="https://api.example") is None


def test_two_hosts_or_origins_are_refused_whatever_is_configured():
    for policy in (strangers("*", hosts=("*",)), strangers(is_guarded=False)):
        assert refusal(policy, host=["localhost", "localhost"]) is InvalidArgument
        assert refusal(policy, host="localhost", origin=[PAGE, PAGE]) is InvalidArgument


@pytest.fixture
def gateway_config(request: pytest.FixtureRequest, gateway_config: GatewayConfig, tmp_path: Path) -> GatewayConfig:
    changes = dict(getattr(request, "param", {}))
    if changes.pop("has_keys", False):
        (tmp_path / "keys.toml").write_text("[keys]\n")
        changes["keys"] = tmp_path / "keys.toml"
    return replace(gateway_config, **changes)


def keys(**changes: object) -> pytest.MarkDecorator:
    """Of [gateway], for one test."""
    return pytest.mark.parametrize("gateway_config", [changes], indirect=True, ids=["keys"])


async def test_a_page_elsewhere_is_refused_in_openais_shape_and_reaches_nothing(
    http: httpx.AsyncClient, worker: FakeWorker
):
    for headers in ({"origin": OTHER}, {"host": "evil.example"}):
        for method, path in (("POST", "/v1/completions"), ("GET", "/metrics"), ("OPTIONS", "/v1/completions")):
            answer = await http.request(method, path, headers=headers | {"x-request-id": "mine"})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (403, "permission_denied", *headers)
            assert error["message"].endswith(("which may", "may be called"))
            assert answer.headers["x-request-id"] == "mine"
            assert not any(name.startswith("access-control") for name in answer.headers)
    assert worker.runs == []
    assert (await http.post("/v1/completions", json=ASKED)).status_code == 200
    own = {"origin": str(http.base_url).rstrip("/")}
    assert (await http.post("/v1/completions", json=ASKED, headers=own)).status_code == 200


@pytest.mark.parametrize(
    ("gateway_config", "is_told"),
    [({"host": "0.0.0.0"}, True), ({"host": "0.0.0.0", "has_keys": True}, False), ({}, False)],
    indirect=["gateway_config"],
)
async def test_a_gateway_that_anybody_reaches_and_may_use_says_so(
    running: RunningGateway, is_told: bool, caplog: pytest.LogCaptureFixture
):
    told = [record.message for record in caplog.get_records("setup") if "without gateway.keys" in record.message]
    assert len(told) == is_told


@keys(has_keys=True)
async def test_with_keys_a_page_needs_one_and_nothing_more(http: httpx.AsyncClient):
    headers = {"origin": OTHER, "host": "anything"}
    assert (await http.get("/health", headers=headers)).status_code == 200
    assert (await http.post("/v1/completions", json=ASKED, headers=headers)).status_code == 401


def preflight(origin: str, **more: str) -> Mapping[str, str]:
    asked = {"origin": origin, "access-control-request-method": "POST"}
    return asked | {name.replace("_", "-"): value for name, value in more.items()}


@keys(allowed_origins=(PAGE,), has_keys=True)
async def test_a_page_that_is_allowed_may_ask_and_read_what_is_ours(http: httpx.AsyncClient):
    asked = preflight(PAGE, access_control_request_headers="authorization, x-stainless-os")
    first = await http.options("/v1/chat/completions", headers=asked)
    assert (first.status_code, first.content) == (204, b"")
    assert first.headers["access-control-allow-origin"] == PAGE
    assert first.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
    assert "POST" in first.headers["access-control-allow-methods"]
    assert "access-control-allow-private-network" not in first.headers
    refused = await http.post("/v1/completions", json=ASKED, headers={"origin": PAGE})  # an error can be read as well
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)
    assert refused.headers["vary"] == "origin"
    other = await http.options("/v1/chat/completions", headers=preflight(OTHER))
    assert (other.status_code, "access-control-allow-origin" in other.headers) == (403, False)


@keys(allowed_origins=("*",))
@pytest.mark.parametrize("is_stream", [False, True])
async def test_any_page_may_where_that_is_said(http: httpx.AsyncClient, is_stream: bool):
    network = preflight(OTHER, access_control_request_private_network="true")
    first = await http.options("/v1/completions", headers=network)
    assert first.headers["access-control-allow-private-network"] == "true"
    answer = await http.post("/v1/completions", json=ASKED | {"stream": is_stream}, headers={"origin": OTHER})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
    exposed = set(answer.headers["access-control-expose-headers"].split(", "))
    assert exposed == {name for name in answer.headers if name.startswith("x-moonshard-")} | {"x-request-id"}
    assert "x-moonshard-worker" in exposed
    assert "access-control-allow-credentials" not in answer.headers


async def test_two_keys_are_refused_over_http(running: RunningGateway, worker: FakeWorker):
    twice = ("Authorization: Bearer one", "authorization: Bearer two")
    async with connected(running) as raw:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
            await raw.send(post(path, ASKED, *twice))
            answer = await raw.answer()
            assert (answer.status, answer.error["param"]) == (400, "authorization")
    assert worker.runs == []


@pytest.fixture
async def channel(running: RunningGateway) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(running.grpc) as channel:
        yield channel


GENERATE, TOKENIZE = f"/{SERVICE.full_name}/Generate", f"/{SERVICE.full_name}/Tokenize"


async def refused_call(
    channel: grpc.aio.Channel, path: str, message: bytes, metadata: Sequence[tuple[str, str]] = ()
) -> RequestError:
    is_stream = path == GENERATE
    try:
        if is_stream:
            async for _ in channel.unary_stream(path)(message, metadata=metadata):
                pass
        else:
            await channel.unary_unary(path)(message, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("was not refused")


async def test_two_keys_are_refused_over_grpc(channel: grpc.aio.Channel, worker: FakeWorker):
    twice = (("authorization", "Bearer one"), ("authorization", "Bearer two"))
    asked = pb.GenerateRequest(tokens=pb.TokenIds(ids=[1]))
    for path, message in ((GENERATE, asked), (TOKENIZE, pb.TokenizeRequest(text="x"))):
        error = await refused_call(channel, path, message.SerializeToString(), metadata=twice)
        assert (type(error), error.field) == (InvalidArgument, "authorization")
    assert worker.runs == []


async def test_a_grpc_message_that_cannot_be_read_is_the_callers_fault(channel: grpc.aio.Channel, worker: FakeWorker):
    for path in (GENERATE, TOKENIZE, "/grpc.health.v1.Health/Check"):
        for message in (b"\xff", b"\x0a\x7fshort", b"\x0a\x02\xff\xfe"):
            error = await refused_call(channel, path, message)
            assert type(error) is InvalidArgument, (path, message, error)
            assert "cannot be read" in error.message
    assert worker.runs == []


async def test_a_stream_of_messages_ends_at_the_one_that_cannot_be_read(channel: grpc.aio.Channel):
    reflection = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in reflection(iter([b"\x3a\x00", b"\xff"])):
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_method_that_is_not_there_is_so_still(channel: grpc.aio.Channel):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(f"/{SERVICE.full_name}/Nothing")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
