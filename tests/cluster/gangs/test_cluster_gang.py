"""A worker of several processes says what the reference says, and whatever becomes of a member, it comes back whole."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from moonshard.serving.config.keys import embedded_model_path
from tests.cluster.conftest import AGGREGATED, Cluster, running, wait_until
from tests.cluster.stored import PROMPTS, answers
from tests.cluster.test_cluster_grammars import asked
from tests.cluster.test_cluster_tokens import http_completion
from tests.engine_room import long_text

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(600)]
TIMEOUT_S = 2.0
BACK_S = 15.0
GANG = {**AGGREGATED, "decode.processes": 2, "worker.gang_timeout_s": TIMEOUT_S}
BY_PARTITION = {"decode.mesh.data": 2}
WITHIN = {"decode.mesh.tensor": 2}
STAGES = {"decode.mesh.pipe": 2}
OF_4 = {"decode.processes": 4}
BOTH = {"decode.mesh.data": 2, "decode.mesh.tensor": 2}


def followers(cluster: Cluster) -> list[int]:
    return [
        child.pid
        for child in psutil.Process(cluster.process.pid).children()
        if child.is_running() and "--leader" in child.cmdline()
    ]


def is_up(cluster: Cluster) -> bool:
    return cluster.metric("moonshard_worker_up") == 1


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(BOTH, id="data 2 tensor 2"),
        pytest.param(BY_PARTITION, id="data 2", marks=pytest.mark.slow),
        pytest.param(WITHIN, id="tensor 2", marks=pytest.mark.slow),
        pytest.param({"decode.mesh.expert": 4}, id="expert 4", marks=pytest.mark.slow),
        pytest.param(STAGES, id="pipe 2", marks=pytest.mark.slow),
        pytest.param({**STAGES, **WITHIN}, id="pipe 2 tensor 2", marks=pytest.mark.slow),
        pytest.param({**STAGES, **WITHIN, **OF_4}, id="pipe 2 tensor 2 of 4", marks=pytest.mark.slow),
        pytest.param({**STAGES, **BY_PARTITION, **OF_4}, id="pipe 2 data 2 of 4", marks=pytest.mark.slow),
        pytest.param({"decode.mesh.pipe": 4}, id="pipe 4", marks=pytest.mark.slow),
    ],
)
def test_a_gang_says_what_the_reference_says_and_ends_in_order(mesh: dict[str, int]):
    with running(**{**GANG, **mesh}) as cluster:
        there = followers(cluster)
        assert len(there) == mesh.get("decode.processes", 2) - 1
        answers(cluster)
        with cluster.http() as http:
            asked = {"model": "kimi_k2", "prompt": PROMPTS[0], "max_tokens": 24, "seed": 5, "echo": True, "logprobs": 2}
            told = http.post("/v1/completions", json=asked).json()
            assert len(told["choices"][0]["logprobs"]["token_logprobs"]) == len(PROMPTS[0]) + 24
        answer_at_once(cluster)
        assert followers(cluster) == there
        assert cluster.is_as_it_began()
    assert not any(map(psutil.pid_exists, there))


def answer_at_once(cluster: Cluster) -> None:
    """Requests that are served together say what each says by itself: stages run steps of unlike slots at once."""
    with ThreadPoolExecutor(8) as threads:
        found = threads.map(lambda prompt: answers(cluster, [prompt]), [*PROMPTS, *PROMPTS])
        assert len(list(found)) == 2 * len(PROMPTS)


def test_a_killed_follower_ends_the_gang_at_once_and_it_comes_back():
    with running(**GANG, **BY_PARTITION) as cluster:
        before = answers(cluster)
        [follower] = followers(cluster)
        began_s = time.monotonic()
        os.kill(follower, signal.SIGKILL)
        assert wait_until(lambda: not is_up(cluster), 10)
        assert time.monotonic() - began_s < 2.0  # with a look at the gateway's metrics
        assert wait_until(lambda: is_up(cluster), 120)
        assert answers(cluster) == before
        assert cluster.is_as_it_began()


@pytest.mark.slow
def test_a_follower_that_is_told_to_end_has_its_gang_drain_and_come_back():
    with running(**GANG, **BY_PARTITION) as cluster:
        [follower] = followers(cluster)
        leader = cluster.pid("worker")
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(http_completion, cluster, PROMPTS[0], max_tokens=400, ignore_eos=True)
            assert wait_until(lambda: cluster.metric("vllm:num_requests_running") == 1, 60)
            os.kill(follower, signal.SIGTERM)
            answer = asked.result(60)
        assert len(answer["choices"][0]["token_ids"]) == 400
        assert wait_until(lambda: not (psutil.pid_exists(leader) or psutil.pid_exists(follower)), 30)
        assert wait_until(lambda: is_up(cluster), 120)
        answers(cluster)
        assert any("has drained and ended; starting it again" in line for line in cluster.lines)


GUESSING = {"speculation.method": '["grammar", "eagle3", "lookup"]'}
WITHOUT_DRAFT = {"speculation.method": '["grammar", "lookup"]'}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "guesses"),
    [
        pytest.param(BY_PARTITION, {}, id="data 2"),
        pytest.param(BY_PARTITION, GUESSING, id="data 2 guessing"),
        pytest.param(WITHIN, {}, id="tensor 2"),
        pytest.param(WITHIN, GUESSING, id="tensor 2 guessing"),
        pytest.param(STAGES, {}, id="pipe 2"),
        pytest.param(STAGES, WITHOUT_DRAFT, id="pipe 2 guessing"),
    ],
)
def test_a_gang_keeps_to_grammars_and_says_what_one_process_says(mesh: dict[str, int], guesses: dict[str, str]):
    """The embedded model's JSON, drawn at a temperature."""
    embedded = {"model.path": embedded_model_path(), **guesses}
    with running(**AGGREGATED, **mesh, **embedded) as alone:
        expected = constrained(alone)
    with running(**GANG, **mesh, **embedded) as gang:
        assert constrained(gang) == expected
        assert bool(gang.metric("vllm:spec_decode_num_drafts_total")) == bool(guesses)


def constrained(cluster: Cluster) -> list[str]:
    """Texts of JSON, the longer ones cut off."""
    return [
        http_completion(cluster, long_text(60, seed=seed), **asked(seed))["choices"][0]["text"] for seed in range(4)
    ]


@pytest.mark.alone
@pytest.mark.parametrize("mesh", [pytest.param(BOTH, id="data 2 tensor 2"), pytest.param(STAGES, id="pipe 2")])
@pytest.mark.parametrize("which", ["leader", "follower"])
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_gang_that_lost_a_member_is_back_in_time(which: str, how: int, mesh: dict[str, int]):
    with running(**GANG, **mesh) as cluster:
        before = answers(cluster)
        pid = 0
        for _ in range(3):
            pid = followers(cluster)[0] if which == "follower" else cluster.pid("worker")
            began_s = time.monotonic()
            os.kill(pid, how)
            assert wait_until(lambda: not is_up(cluster), 12)
            noticed_s = time.monotonic() - began_s
            assert noticed_s < (1.0 if how == signal.SIGKILL else TIMEOUT_S + 1.0)
            assert wait_until(lambda: is_up(cluster), 120)
            assert time.monotonic() - began_s - noticed_s < BACK_S
            assert answers(cluster) == before
            assert cluster.is_as_it_began()
        assert not psutil.pid_exists(pid)
