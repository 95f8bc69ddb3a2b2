"""Prefill and decode workers of several processes hand KV over member to member, whatever the two meshes are.

And whatever becomes of a member meanwhile, no token is wrong and nothing is left.
"""

import os
import random
import signal
import time
from collections.abc import Sequence
from typing import Any, cast

import psutil
import pytest

from tests.cluster.conftest import Cluster, running, wait_until
from tests.cluster.stored import answers
from tests.cluster.streams import Ask, Heard, Listeners, assert_all_right, draw

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(900)]
TIMEOUT_S = 2.0
BACK_S = 15.0
STALL_S = 2.0
GANG = {"worker.gang_timeout_s": TIMEOUT_S, "routing.failover_wait_s": 60.0}
PREFILL_GANG = {**GANG, "prefill.processes": 2}
DECODE_GANG = {**GANG, "decode.processes": 2}
BOTH_GANGS = {**PREFILL_GANG, **DECODE_GANG}
TENSOR_TO_DATA = {**BOTH_GANGS, "prefill.mesh.tensor": 2, "decode.mesh.data": 2}


def followers(cluster: Cluster, role: str) -> list[int]:
    """The pids of all that follow a leader of this role."""
    children = psutil.Process(cluster.process.pid).children()
    commands = ((child.pid, child.cmdline()) for child in children if child.is_running())
    return [pid for pid, command in commands if "--leader" in command and role in command]


def num_up(cluster: Cluster) -> float:
    return cluster.metric("moonshard_worker_up")


def assert_handed_over(cluster: Cluster) -> None:
    """Something was, all of it arrived as it was sent, and nothing is left."""
    sent, landed = cluster.inspect("prefill").load.kv_transfer, cluster.inspect("decode").load.kv_transfer
    assert sent.published_bytes == landed.landed_bytes > 0
    assert not sent.num_failures
    assert not landed.num_checksum_mismatches
    assert wait_until(cluster.is_as_it_began, 10)


@pytest.mark.parametrize(
    "arranged",
    [
        pytest.param(TENSOR_TO_DATA, id="tensor 2 to data 2"),
        *(
            pytest.param(arranged, id=name, marks=pytest.mark.slow)
            for name, arranged in {
                "data 2 to tensor 2": {**BOTH_GANGS, "prefill.mesh.data": 2, "decode.mesh.tensor": 2},
                "tensor 4 to expert 2 tensor 2": {
                    **BOTH_GANGS,
                    "prefill.mesh.tensor": 4,
                    "decode.mesh.expert": 2,
                    "decode.mesh.tensor": 2,
                },
                "tensor 2 by tokens to tensor 2": {
                    **BOTH_GANGS,
                    "prefill.mesh.tensor": 2,
                    "prefill.rules.kv_tokens": '["tensor"]',
                    "decode.mesh.tensor": 2,
                },
                "tensor 2 to data 2 by grpc": {**TENSOR_TO_DATA, "kv.transport": "grpc"},
                "tensor 2 to one process by grpc": {
                    **PREFILL_GANG,
                    "prefill.mesh.tensor": 2,
                    "kv.transport": "grpc",
                },
                "one process to tensor 2 by grpc": {
                    **DECODE_GANG,
                    "decode.mesh.tensor": 2,
                    "kv.transport": "grpc",
                },
                "tensor 2 to one process": {**PREFILL_GANG, "prefill.mesh.tensor": 2},
                "pipe 2 to data 2": {**BOTH_GANGS, "prefill.mesh.pipe": 2, "decode.mesh.data": 2},
                "tensor 2 to pipe 2 tensor 2": {
                    **BOTH_GANGS,
                    "prefill.mesh.tensor": 2,
                    "decode.mesh.pipe": 2,
                    "decode.mesh.tensor": 2,
                },
                "pipe 2 tensor 2 of 4 processes to pipe 2": {
                    **BOTH_GANGS,
                    "prefill.processes": 4,
                    "prefill.mesh.pipe": 2,
                    "prefill.mesh.tensor": 2,
                    "decode.mesh.pipe": 2,
                },
                "one process to tensor 2": {**DECODE_GANG, "decode.mesh.tensor": 2},
                "two devices of one process to tensor 2": {
                    **DECODE_GANG,
                    "prefill.mesh.tensor": 2,
                    "decode.mesh.tensor": 2,
                },
            }.items()
        ),
    ],
)
def test_workers_of_several_processes_say_what_the_reference_says(arranged: dict[str, object]):
    with running(**arranged) as cluster:
        for role in ("prefill", "decode"):
            assert len(followers(cluster, role)) == int(str(arranged.get(f"{role}.processes", 1))) - 1
        answers(cluster)
        assert_handed_over(cluster)


def asked_under_load(cluster: Cluster, rng: random.Random) -> tuple[Sequence[Ask], Listeners]:
    """Clients who ask one request after another, once all have begun to hear and prompts are still to come."""
    asked = [draw(rng, number) for number in range(12)]
    listeners = Listeners(cast(Any, cluster), asked, num_clients=4)
    assert wait_until(lambda: listeners.num_tokens > 20, 60)
    return asked, listeners


def lose(pid: int, how: int) -> float:
    """When it was lost."""
    os.kill(pid, how)
    return time.monotonic()


def assert_noticed(cluster: Cluster, how: int, lost_s: float, num_left: int) -> None:
    assert wait_until(lambda: num_up(cluster) == num_left, 12)
    assert time.monotonic() - lost_s < (1.0 if how == signal.SIGKILL else TIMEOUT_S + 1.0)


@pytest.mark.alone
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("transport", ["mooncake", "grpc"])
def test_a_follower_that_is_lost_during_handoffs_comes_back_and_costs_nobody_a_token(
    role: str, how: int, transport: str
):
    rng = random.Random(7)
    with running(**TENSOR_TO_DATA, **{"kv.transport": transport}) as cluster:
        answers(cluster)
        for _ in range(3):
            asked, listeners = asked_under_load(cluster, rng)
            [pid] = followers(cluster, role)
            lost_s = lose(pid, how)
            assert_noticed(cluster, how, lost_s, num_left=1)
            assert wait_until(lambda: num_up(cluster) == 2, 120)
            assert time.monotonic() - lost_s < BACK_S + (TIMEOUT_S if how == signal.SIGSTOP else 0.0)
            assert_all_right(asked, listeners.wait(240))
            assert wait_until(cluster.is_as_it_began, 15)
            assert not psutil.pid_exists(pid)


@pytest.mark.alone
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_where_there_is_another_worker_streams_go_on_there(role: str):
    rng = random.Random(8)
    with running(**TENSOR_TO_DATA, **{f"{role}.replicas": 2}) as cluster:
        answers(cluster)
        asked, listeners = asked_under_load(cluster, rng)
        lost_s = lose(followers(cluster, role)[0], signal.SIGKILL)
        assert_noticed(cluster, signal.SIGKILL, lost_s, num_left=2)
        heard: Sequence[Heard] = listeners.wait(240)
        assert_all_right(asked, heard)
        assert max(each.longest_gap_s for each in heard) < STALL_S
        assert wait_until(lambda: num_up(cluster) == 3, 120)
        assert wait_until(cluster.is_as_it_began, 15)
