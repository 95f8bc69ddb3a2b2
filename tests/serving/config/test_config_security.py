"""Who may reach the KV plane: nothing beyond loopback without the user having said so, and the files of [tls]."""

from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from moonshard.rpc.server.server import build_server
from moonshard.serving.config.faults import kv_plane_note
from moonshard.serving.config.keys import Config, ConfigError
from moonshard.serving.config.kv_ports import library_ports, store_ports
from moonshard.serving.config.loopback import is_loopback
from moonshard.serving.config.reading import load_config
from moonshard.serving.config.tls import link_credentials, server_tls
from tests.certificates import needs_openssl, openssl, self_signed

ALLOWED = "kv.allow_unauthenticated=true"
FENCE = "kv.network_fence=vlan 7"


def tls_of(cert: Path, key: Path, ca: Path) -> list[str]:
    return [f"tls.cert={cert}", f"tls.key={key}", f"tls.ca={ca}"]


def faults(*overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        load_config(None, overrides)
    return raised.value.faults


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *((name, True) for name in ("127.0.0.1", "127.9.9.9", "::1", "localhost")),
        *((name, False) for name in ("0.0.0.0", "10.0.0.1", "::", "node-1", "localhost.example.org", "128.0.0.1")),
    ],
)
def test_loopback_is_what_no_other_machine_reaches(host: str, expected: bool):
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("place", "key"),
    [
        (["kv.host=10.0.0.1"], "kv.host: 10.0.0.1"),
        (["worker.host=10.0.0.1"], "worker.host: 10.0.0.1"),
        (["worker.host=10.0.0.1", "kv.host=127.0.0.1"], "worker.host: 10.0.0.1"),
        (["kv.host=node-1"], "kv.host: node-1"),
    ],
)
@pytest.mark.parametrize("transport", ["mooncake", "grpc"])
def test_kv_is_not_served_beyond_loopback_unless_the_user_says_so(place: list[str], key: str, transport: str):
    place = [*place, f"kv.transport={transport}"]
    (fault,) = faults(*place)
    assert fault.startswith(f"{key} is not loopback, and ")
    assert fault.endswith("or set kv.allow_unauthenticated = true")
    assert load_config(None, [*place, ALLOWED]).kv.transport == transport


def test_mooncake_beyond_loopback_needs_tls_and_a_fence_and_grpc_needs_tls(tmp_path: Path):
    (tmp_path / "x").touch()
    tls = tls_of(*[tmp_path / "x"] * 3)
    (fault,) = faults("kv.host=10.0.0.1", *tls)
    assert "without authentication: whoever reaches its ports can write into and read from registered memory" in fault
    assert faults("kv.host=10.0.0.1", FENCE) == (fault,)
    assert load_config(None, ["kv.host=10.0.0.1", FENCE, *tls]).kv.network_fence == "vlan 7"
    assert load_config(None, ["kv.host=10.0.0.1", "kv.transport=grpc", *tls]).tls.is_complete
    (fault,) = faults("kv.host=10.0.0.1", "kv.transport=grpc", FENCE)
    assert "gRPC without [tls] is plain text without authentication" in fault


STORE = ("mode=aggregated", "kv.store.enabled=true", "kv.store.dram_bytes=20000000")


def test_mooncake_store_beyond_loopback_needs_tls_and_a_fence_by_whatever_key_it_is_there(tmp_path: Path):
    (tmp_path / "x").touch()
    tls = tls_of(*[tmp_path / "x"] * 3)
    for place in ("kv.store.client=10.0.0.1:7", "kv.host=10.0.0.1"):
        (fault,) = faults(*STORE, place)
        assert fault.startswith(f"{place.partition('=')[0]}: 10.0.0.1 is not loopback, and Mooncake listens on all")
        assert faults(*STORE, place, FENCE) == (fault,)
        assert load_config(None, [*STORE, place, FENCE, *tls]).kv.store.is_shared
        assert load_config(None, [*STORE, place, ALLOWED]).kv.store.is_shared
    assert load_config(None, [*STORE, "kv.store.client=127.0.0.1:7"]).kv.store.is_shared


def test_a_store_that_machines_share_needs_a_name_of_each():
    master = "kv.store.master=10.0.0.9:7"
    expected = "kv.host: name the address by which other machines reach this one; 10.0.0.9 is one of them"
    assert faults(*STORE, master) == (expected,)
    assert faults(*STORE, master, "kv.store.client=127.0.0.1:7") == (expected,)
    assert load_config(None, [*STORE, master, "kv.host=10.0.0.1", ALLOWED]).kv.store.master == "10.0.0.9:7"


def test_a_store_at_an_ipv6_address_is_refused_by_its_key():
    (fault,) = faults(*STORE, "kv.store.client=[::1]:7", ALLOWED)
    assert fault == "kv.store.client: Mooncake Store is reached by a name or an IPv4 address, not by [::1]"
    (fault,) = faults(*STORE, "kv.host=::1", ALLOWED)
    assert fault == "kv.host: Mooncake Store is reached by a name or an IPv4 address, not by ::1"


OWN = "kv.store.master=auto"
OTHERS = "kv.store.master=127.0.0.1:7"


@pytest.mark.parametrize(
    ("keys", "first_of_library", "least"),
    [
        (["mode=disaggregated"], 20100, 2),
        ([*STORE, OWN], 20103, 5),
        ([*STORE, OTHERS], 20101, 3),
        ([*STORE, OWN, "mode=disaggregated"], 20103, 7),
        ([*STORE, OTHERS, "mode=disaggregated"], 20101, 5),
        ([*STORE, OWN, "mode=disaggregated", "kv.transport=grpc"], 20103, 5),
        (["kv.store.enabled=true", "kv.store.client=127.0.0.1:20100", "mode=disaggregated"], 20103, 7),
        (["kv.store.enabled=true", "kv.store.client=127.0.0.1:7", "mode=disaggregated"], 20100, 2),
    ],
)
def test_the_first_ports_are_the_stores_the_others_the_librarys_and_fewer_are_refused(
    keys: list[str], first_of_library: int, least: int
):
    last = 20100 + least - 1
    config = load_config(None, [*keys, f"kv.ports=[20100, {last}]"])
    assert list(store_ports(config)) == list(range(20100, first_of_library))
    assert library_ports(config) == (first_of_library, last)
    (fault,) = faults(*keys, f"kv.ports=[20100, {last - 1}]")
    assert fault.startswith(f"kv.ports: {least} are needed for ")
    assert fault.endswith(f", 20100 to {last - 1} are {least - 1}")


def test_the_stores_client_is_at_the_first_of_its_ports():
    for port in (7, 20101):  # outside the fence, and where the library may listen
        fault = f"kv.store.client: of kv.ports, 20100 to 20109, the first is its port, not {port}"
        assert faults(*STORE, "kv.ports=[20100, 20109]", f"kv.store.client=127.0.0.1:{port}") == (fault,)
    assert load_config(None, [*STORE, "kv.ports=[20100, 20109]", "kv.store.client=127.0.0.1:20100"]).kv.store.is_shared


@pytest.mark.parametrize("key", ["client", "master"])
def test_an_address_that_is_none_is_one_fault(key: str):
    for url in ("http://127.0.0.1:7", "http://10.0.0.1:7", "127.0.0.1"):
        expected = f"kv.store.{key}: expected host:port, got {url!r}"
        assert faults(*STORE, f"kv.store.{key}={url}", "kv.ports=[20100, 20109]") == (expected,)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_host_that_means_all_interfaces_is_no_name_for_peers(host: str):
    fault = f"kv.host: peers reach no machine at {host}; name this one"
    assert faults(f"worker.host={host}", ALLOWED) == (fault,)
    assert faults(f"kv.host={host}", ALLOWED) == (fault,)
    assert load_config(None, [f"worker.host={host}", "kv.host=node-1", ALLOWED]).worker.host == host


def test_the_logs_say_why_a_kv_plane_beyond_loopback_is_allowed(tmp_path: Path):
    (tmp_path / "x").touch()
    tls = tls_of(*[tmp_path / "x"] * 3)
    assert kv_plane_note(load_config(None, [])) is None
    assert kv_plane_note(load_config(None, ["mode=aggregated", "worker.host=10.0.0.1", ALLOWED])) is None
    assert kv_plane_note(load_config(None, ["kv.host=a", "kv.transport=grpc", *tls])) is None
    fenced, opened = load_config(None, ["kv.host=a", FENCE, *tls]), load_config(None, ["kv.host=a", ALLOWED])
    assert kv_plane_note(fenced) == "the KV plane of a is not authenticated; its network is fenced: vlan 7"
    assert kv_plane_note(opened) == "the KV plane of a is open to whoever reaches it (kv.allow_unauthenticated)"


def test_without_tls_everything_is_plain_text():
    config = load_config(None)
    assert (server_tls(config), link_credentials(config)) == (None, None)


async def answers(server: Config, credentials: grpc.ChannelCredentials | None) -> bool:
    """Whether a server secured by the one configuration lets in who has these credentials."""
    bound = build_server(host="127.0.0.1", port=0, add_servicers=[], service_names=[], tls=server_tls(server))
    await bound.start()
    address = f"127.0.0.1:{bound.port}"
    if credentials is None:
        channel = grpc.aio.insecure_channel(address)
    else:
        channel = grpc.aio.secure_channel(address, credentials)
    try:
        async with channel:
            check = health_pb2_grpc.HealthStub(channel).Check  # pyright: ignore[reportAttributeAccessIssue]
            await check(health_pb2.HealthCheckRequest(), timeout=10)
            return True
    except grpc.aio.AioRpcError as error:
        if error.code() != grpc.StatusCode.UNAVAILABLE:
            raise
        return False
    finally:
        await bound.stop(0)


@needs_openssl
async def test_a_worker_lets_in_only_whom_its_authority_has_signed(tmp_path: Path):
    (cert, key), (other_cert, other_key) = self_signed(tmp_path, "ours"), self_signed(tmp_path, "other")
    ours = load_config(None, tls_of(cert, key, cert))
    impostor = load_config(None, tls_of(other_cert, other_key, cert))  # believes us, is signed by another
    distrustful = load_config(None, tls_of(cert, key, other_cert))  # is signed by ours, believes another
    assert await answers(ours, link_credentials(ours))
    assert not await answers(ours, link_credentials(impostor))
    assert not await answers(ours, link_credentials(distrustful))
    assert not await answers(ours, None)


@needs_openssl
async def test_files_that_cannot_serve_are_named_when_the_process_starts(tmp_path: Path):
    (cert, key), (other_cert, _) = self_signed(tmp_path, "ours"), self_signed(tmp_path, "other")
    (tmp_path / "text").write_text("no certificate")
    encryption = ("-aes256", "-passout", "pass:secret")
    openssl("ec", "-in", key, "-out", tmp_path / "secret.key", *encryption)
    mismatched = (other_cert, key, cert)
    for files, begin in (
        (mismatched, f"tls.cert, tls.key: {other_cert} and {key} are no matching PEM pair"),
        ((cert, tmp_path / "secret.key", cert), f"tls.cert, tls.key: {cert} and {tmp_path / 'secret.key'} are"),
        ((cert, key, tmp_path / "text"), f"tls.ca: {tmp_path / 'text'} holds no PEM certificate"),
    ):
        config = load_config(None, tls_of(*files))
        for use in (server_tls, link_credentials):
            with pytest.raises(ConfigError) as raised:
                use(config)
            assert raised.value.faults[0].startswith(begin)
