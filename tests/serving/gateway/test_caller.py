"""Whatever a client sends as its session or its key: a caller, or one error that says what is wrong."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from moonshard.rpc.status import InvalidArgument, Unauthenticated
from moonshard.serving.config.tenants import Tenant, Tenants, hash_key
from moonshard.serving.control.routing.pins import affinity_key
from moonshard.serving.gateway.caller import SESSION_NAMES, read_caller
from moonshard.serving.gateway.http.edge import header_of

OPEN = Tenants(None)
KEYS = Tenants({hash_key("one"): Tenant("a"), hash_key("two"): Tenant("b")})


def headers(**values: str) -> Callable[[str], str | None]:
    return {name.replace("_", "-"): value for name, value in values.items()}.get


def test_the_first_name_that_is_there_counts_and_the_bodys_come_last():
    for index, name in enumerate(SESSION_NAMES):
        given = {later: later for later in SESSION_NAMES[index:]}
        assert read_caller(OPEN, given.get, "cache key", "user").affinity_key == affinity_key("default", name)
    assert read_caller(OPEN, headers(), None, "user").affinity_key == affinity_key("default", "user")
    assert read_caller(OPEN, headers(), "cache key", "user").affinity_key == affinity_key("default", "cache key")
    assert read_caller(OPEN, headers(x_session_affinity=""), None, None).affinity_key is None


@given(st.text(min_size=1) | st.just("x" * 10_240) | st.just("☃" * 4000))
def test_a_session_of_any_name_is_a_short_hash_of_its_tenants_own(name: str):
    keys = [read_caller(KEYS, headers(authorization=f"Bearer {key}"), name).affinity_key for key in ("one", "two")]
    assert None not in keys
    assert [len(key or b"") for key in keys] == [16, 16]
    assert keys[0] != keys[1]


@pytest.mark.parametrize("authorization", [None, "", "Bearer three", "one", "Basic one", "Bearer"])
def test_a_key_that_names_nobody_is_refused_as_openai_does(authorization: str | None):
    with pytest.raises(Unauthenticated) as refused:
        read_caller(KEYS, {"authorization": authorization}.get)
    assert (refused.value.http_status, refused.value.openai_code) == (401, "invalid_api_key")


def test_a_key_may_come_as_anthropics_clients_send_it_and_the_other_header_counts_where_both_are_there():
    assert read_caller(KEYS, headers(x_api_key="two")).tenant.name == "b"
    assert read_caller(KEYS, headers(x_api_key="two", authorization="Bearer one")).tenant.name == "a"
    for unknown in (headers(x_api_key="three"), headers(x_api_key="one", authorization="Bearer three")):
        with pytest.raises(Unauthenticated):
            read_caller(KEYS, unknown)


def test_two_keys_of_one_name_are_refused():
    raw = [(b"x-api-key", b"one"), (b"x-api-key", b"two")]
    with pytest.raises(InvalidArgument, match="x-api-key is given 2 times"):
        read_caller(KEYS, header_of(Request({"type": "http", "headers": raw})))


@pytest.mark.parametrize("name", ["\u2603", "caf\u00e9", "plain"])
def test_a_name_means_the_same_in_a_header_as_in_a_body(name: str):
    raw = [(b"x-session-id", name.encode()), (b"authorization", b"Bearer " + name.encode())]
    header = header_of(Request({"type": "http", "headers": raw}))
    tenants = Tenants({hash_key(name): Tenant("a")})
    assert read_caller(tenants, header).affinity_key == affinity_key("a", name)
    assert header("x-other") is None


def test_a_header_that_is_no_utf8_is_some_name_too():
    header = header_of(Request({"type": "http", "headers": [(b"x-session-id", b"\xe9\xff")]}))
    assert read_caller(OPEN, header).affinity_key == affinity_key("default", "\xe9\xff")


def test_where_no_key_is_asked_for_any_is_let_in():
    assert read_caller(OPEN, headers(authorization="Bearer whatever")).tenant.name == "default"
