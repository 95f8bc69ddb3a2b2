"""A follower joins its leader as soon as that is there, tells the user why it may not, and never waits for ever."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from moonshard.rpc import link_pb2
from moonshard.rpc.server.server import build_server
from moonshard.serving.config.cluster_key import cluster_key
from moonshard.serving.config.keys import Config, ConfigError, TlsConfig
from moonshard.serving.config.reading import load_config
from moonshard.serving.config.tls import server_tls
from moonshard.serving.gang.follower import _meet_leader
from moonshard.serving.gang.leader import SERVICE
from moonshard.serving.gang.members import Member, member_of
from tests.certificates import Authority, needs_openssl
from tests.serving.gang.scripted_members import HANG_S, MADE_OF
from tests.serving.gateway.conftest import FIXTURE

pytestmark = pytest.mark.timeout(60)
NOBODY = "127.0.0.1:1"


class ScriptedLeader:
    """Ends the first streams in that way, and welcomes those after."""

    def __init__(self, num_ended: int = 0, ending: tuple[grpc.StatusCode, str] | None = None):
        self.hellos: list[link_pb2.FollowerHello] = []
        self._num_ended = num_ended
        self._ending = ending

    def add_to(self, server: grpc.aio.Server) -> None:
        handler = grpc.stream_stream_rpc_method_handler(
            self._follow,
            request_deserializer=link_pb2.FollowerMessage.FromString,
            response_serializer=link_pb2.LeaderMessage.SerializeToString,
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, {"Follow": handler}),))

    async def _follow(
        self, messages: AsyncIterator[link_pb2.FollowerMessage], context: grpc.aio.ServicerContext
    ) -> None:
        self.hellos.append((await anext(messages)).hello)
        if len(self.hellos) <= self._num_ended:
            if self._ending is not None:
                await context.abort(*self._ending)
        else:
            await context.write(link_pb2.LeaderMessage(welcome=link_pb2.GangWelcome(coordinator="there:7")))
            await asyncio.Event().wait()


@asynccontextmanager
async def led_by(leader: ScriptedLeader | SimpleNamespace, config: Config, port: int = 0) -> AsyncIterator[str]:
    server = build_server(
        host="127.0.0.1",
        port=port,
        add_servicers=[leader.add_to],
        service_names=[SERVICE.full_name],
        tls=server_tls(config),
        key=cluster_key(config, {}).proofs,
    )
    await server.start()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)


def config_in(folder: Path, **more: object) -> Config:
    keys = {"model.path": FIXTURE, "mode": "aggregated", "cluster.key_file": folder / "cluster.key", **more}
    return load_config(None, [f"{key}={value}" for key, value in keys.items()])


async def met(config: Config, leader: str) -> str:
    async with asyncio.timeout(HANG_S):
        call, coordinator = await _meet_leader(config, Member(1, 2, leader), MADE_OF)
        call.cancel()
        return coordinator


async def test_a_follower_says_who_it_is_and_hears_where_all_meet(tmp_path: Path):
    config, leader = config_in(tmp_path), ScriptedLeader()
    async with led_by(leader, config) as address:
        assert await met(config, address) == "there:7"
    assert [(hello.member, dict(hello.made_of)) for hello in leader.hellos] == [(1, MADE_OF)]


@pytest.mark.parametrize("ending", [None, (grpc.StatusCode.UNAVAILABLE, "it ends")])
async def test_a_follower_of_a_gang_that_ends_joins_the_next(
    tmp_path: Path, ending: tuple[grpc.StatusCode, str] | None
):
    config, leader = config_in(tmp_path), ScriptedLeader(2, ending)
    async with led_by(leader, config) as address:
        assert await met(config, address) == "there:7"
    assert len(leader.hellos) == 3


async def test_a_follower_waits_for_a_leader_that_is_not_there_yet(tmp_path: Path):
    config = config_in(tmp_path)
    async with led_by(ScriptedLeader(), config) as address:
        port = int(address.rpartition(":")[2])
    meeting = asyncio.create_task(met(config, address))
    async with led_by(ScriptedLeader(), config, port):
        assert await meeting == "there:7"


@pytest.mark.parametrize("code", [grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT])
async def test_a_follower_that_is_refused_tells_why_and_does_not_ask_again(tmp_path: Path, code: grpc.StatusCode):
    config, leader = config_in(tmp_path), ScriptedLeader(9, (code, "member 1 has another checkpoint"))
    async with led_by(leader, config) as address:
        with pytest.raises(ConfigError, match="the leader refuses this member: member 1 has another checkpoint"):
            await met(config, address)
    assert len(leader.hellos) == 1


async def test_a_leader_with_another_key_is_told_by_the_key_of_the_file(tmp_path: Path):
    (tmp_path / "other").mkdir()
    async with led_by(ScriptedLeader(), config_in(tmp_path / "other")) as address:
        with pytest.raises(
            ConfigError, match=r"cluster\.key_file: whoever answers at 127\.0\.0\.1:\d+ has another key"
        ):
            await met(config_in(tmp_path), address)


async def test_a_leader_that_never_comes_is_told_after_a_time(tmp_path: Path):
    config = config_in(tmp_path, **{"worker.gang_join_timeout_s": 0.5})
    with pytest.raises(
        ConfigError, match=r"gang_join_timeout_s: the gang of 127\.0\.0\.1:1 was not complete in 0\.5 s"
    ):
        await met(config, NOBODY)


async def test_that_whoever_answers_leads_no_gang_is_told(tmp_path: Path):
    config = config_in(tmp_path, **{"worker.gang_join_timeout_s": 0.5})
    async with led_by(SimpleNamespace(add_to=lambda server: None), config) as address:
        with pytest.raises(ConfigError, match=rf"{address} was not joined: it is something else: Method not found"):
            await met(config, address)


@needs_openssl
async def test_with_certificates_only_who_has_one_of_the_same_authority_joins(tmp_path: Path):
    config = config_in(tmp_path, **{"worker.gang_join_timeout_s": 2.0})
    ours, theirs = (Authority(tmp_path, name).issue(f"{name} machine") for name in ("ours", "theirs"))
    async with led_by(ScriptedLeader(), replace(config, tls=ours)) as address:
        assert await met(replace(config, tls=ours), address) == "there:7"
        for tls, why in ((theirs, "CERTIFICATE_VERIFY_FAILED"), (TlsConfig(), "expects TLS")):
            with pytest.raises(ConfigError, match=rf"{address} was not joined: .*{why}"):
                await met(replace(config, tls=tls), address)


@pytest.mark.parametrize(
    ("index", "leader", "fault"),
    [
        (2, NOBODY, "--member 2: decode.processes is 2; the last member is 1"),
        (-1, NOBODY, "--member -1: decode.processes is 2"),
        (1, None, "--leader: where member 1 finds member 0"),
        (0, NOBODY, "--leader: member 0 has none"),
    ],
)
def test_members_that_a_gang_does_not_have_are_told(tmp_path: Path, index: int, leader: str | None, fault: str):
    config = config_in(tmp_path, **{"decode.processes": 2, "decode.mesh.tensor": 2})
    with pytest.raises(ConfigError, match=fault):
        member_of(config, "both", index, leader)
