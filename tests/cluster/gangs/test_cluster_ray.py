"""Workers on the logical nodes of a Ray cluster: the same tokens, a lost node, and clusters that cannot have them."""

import contextlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import AGGREGATED, OVERRIDES, Cluster, running, wait_until
from tests.cluster.gangs.test_cluster_gang import GANG, is_up
from tests.cluster.stored import answers
from tests.cluster.streams import Ask, Listeners, assert_all_right
from tests.engine_room import long_text

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("cluster"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: `make ray` does it"),
]
HEAD, NODES = "127.0.1.1", ("127.0.1.2", "127.0.1.3")
NUM_IN_TURN = 12  # by each client: a node goes a while after it was told to, and somebody has to be served until then
CONNECT_S = 45.0  # that a Ray which is not there may take, with the start of two processes on a busy machine


@dataclass
class RayNodes:
    process: subprocess.Popen[str]
    address: str

    def tell(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@contextlib.contextmanager
def ray_nodes(num_cpus: int) -> Iterator[RayNodes]:
    """A head without CPUs, and two nodes with so many each."""
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:  # sockets have short names
        argv = [sys.executable, str(Path(__file__).with_name("ray_nodes.py")), folder, f"{HEAD}=0"]
        argv += [f"{node}={num_cpus}" for node in NODES]
        Path(folder, "ray").mkdir()  # Ray writes into this folder of RAY_TMPDIR, and makes it only on some of its ways
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": folder}
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as nodes:
            assert nodes.stdout is not None
            address = nodes.stdout.readline().strip()
            assert address, "the nodes did not come up"
            yield RayNodes(nodes, address)


def on(nodes: RayNodes) -> tuple[str, ...]:
    return ("--launcher", "ray", "--ray-address", nodes.address)


def refusal(*options: str, **overrides: object) -> tuple[int, str, float]:
    """The exit code of a `serve` that does not come about, what it says, and how long that took, in seconds."""
    argv = [sys.executable, "-m", "moonshard.serving.cli", "serve", "--launcher", "ray", *options]
    argv += [word for key, value in {**OVERRIDES, **overrides}.items() for word in ("--set", f"{key}={value}")]
    began_s = time.monotonic()
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stderr, time.monotonic() - began_s


def hosts(cluster: Cluster) -> list[str]:
    """Of the nodes where the gateway has its workers."""
    with cluster.http() as http:
        return re.findall(r'moonshard_worker_up\{worker="([^"]*):\d+"\} 1', http.get("/metrics").text)


def commands_at(host: str) -> list[psutil.Process]:
    """The processes of workers that were placed there."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(f'worker.host="{host}"' in word for word in process.info["cmdline"] or ())
    ]


def listening(process: psutil.Process) -> list[str]:
    """The addresses at which it listens."""
    return [at.laddr.ip for at in process.net_connections("inet") if at.status == psutil.CONN_LISTEN]


def test_a_gang_whose_node_is_lost_under_load_comes_back_on_the_other_and_its_streams_go_on():
    gang = {**GANG, "decode.mesh.data": 2, "routing.failover_wait_s": 120.0}
    with ray_nodes(num_cpus=2) as nodes, running(*on(nodes), **gang) as cluster:
        before = answers(cluster)
        [host] = hosts(cluster)
        [other] = set(NODES) - {host}
        assert len(commands_at(host)) == 2, "a gang that fits on one node is on one"
        streams = [
            Listeners(cluster, [Ask(prompt=long_text(50 + length), max_tokens=400, over=over)] * NUM_IN_TURN, 1)
            for length, over in enumerate(("grpc", "http", "grpc", "http"))
        ]
        assert wait_until(lambda: all(each.num_tokens for each in streams), 60)
        nodes.tell(f"remove {host}")
        assert wait_until(lambda: not is_up(cluster), 10)
        cut_off = [[heard for heard in each.heard if heard.tokens and not heard.ended_s] for each in streams]
        for each in streams:
            assert_all_right(each.asked, each.wait(240))
        assert hosts(cluster) == [other]
        assert any(cut_off[::2]), "no stream over gRPC was under way"
        assert all(heard.num_retries == 1 for over_grpc in cut_off[::2] for heard in over_grpc)
        assert answers(cluster) == before
        assert not commands_at(host), "what ran on the lost node runs on"
        left = commands_at(other)
    assert len(left) == 2
    assert not any(process.is_running() for process in left)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("which", ["leader", "follower"])
def test_a_gang_that_loses_a_member_comes_back_as_a_unit_where_its_node_is(which: str, how: signal.Signals):
    gang = {**GANG, "decode.mesh.data": 2, "routing.failover_wait_s": 120.0}
    with ray_nodes(num_cpus=2) as nodes, running(*on(nodes), **gang) as cluster:
        before = answers(cluster)
        [host] = hosts(cluster)
        there = commands_at(host)
        asked = [Ask(prompt=long_text(60, seed=3), max_tokens=400)]
        streams = Listeners(cluster, asked)
        assert wait_until(lambda: all(heard.tokens for heard in streams.heard), 60)
        [lost] = [process for process in there if ("--leader" in process.cmdline()) == (which == "follower")]
        lost.send_signal(how)
        assert wait_until(lambda: not is_up(cluster), 10)
        assert_all_right(asked, streams.wait(240))
        assert answers(cluster) == before
        [host] = hosts(cluster)
        assert len(commands_at(host)) == 2
        assert not any(process.is_running() for process in there)


def test_workers_on_two_nodes_hand_kv_over_and_nothing_of_it_goes_through_rays_objects():
    with ray_nodes(num_cpus=1) as nodes, running(*on(nodes)) as cluster:
        answers(cluster)
        assert cluster.metric("moonshard_kv_landed_bytes_total") > 0
        assert set(hosts(cluster)) == set(NODES)
        assert "usage 0 MiB, 0 objects" in nodes.tell("objects")
        secret = Path(os.environ["XDG_STATE_HOME"], "moonshard", "cluster.key").read_text().strip()
        said = [word for process in psutil.process_iter(["cmdline"]) for word in process.info["cmdline"] or ()]
        assert not any(secret in word for word in said)
        files = [path for path in Path(tempfile.gettempdir()).glob("r*/session_*/**/*") if path.is_file()]
        assert files
        assert not any(secret.encode() in path.read_bytes() for path in files)


def test_a_ray_of_its_own_listens_on_loopback_alone_and_leaves_nothing():
    before, files = set(psutil.pids()), set(Path(tempfile.gettempdir()).glob("moonshard-*"))
    with running("--launcher", "ray", **AGGREGATED) as cluster:
        answers(cluster)
        assert [path for path in Path(tempfile.gettempdir()).glob("moonshard-*") if path not in files]
        ours = psutil.Process(cluster.process.pid).children(recursive=True)
        assert any("raylet" in process.name() for process in ours)
        assert [place for process in ours for place in listening(process) if "127.0.0.1" not in place] == []
    assert set(Path(tempfile.gettempdir()).glob("moonshard-*")) <= files
    assert wait_until(lambda: not any(p.pid not in before and p.is_running() for p in ours), 10)


def test_a_cluster_that_has_too_little_is_told_what_lacks():
    with ray_nodes(num_cpus=1) as nodes:
        code, said, _ = refusal(*on(nodes)[2:], **AGGREGATED, **{"decode.mesh.data": 2})
        assert code == 2
        assert "worker 0 needs 2 CPU on one node; the most that one has is 1 CPU" in said
        code, said, _ = refusal(*on(nodes)[2:], **{"decode.replicas": 2})
        assert code == 2
        assert "the workers need 3 CPU in all; the cluster has 2 CPU" in said
        code, said, _ = refusal(*on(nodes)[2:], "--ray-device", "GPU")
        assert code == 2
        assert "needs 1 CPU and 1 GPU on one node; the most that one has is 1 CPU and 0 GPU" in said


@pytest.mark.parametrize("kind", ["nobody", "silent"])
def test_a_ray_that_is_not_there_is_named_within_a_bound(kind: str):
    """Nothing listens there; or something does that says nothing, as a firewall, a hung or another program."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if kind == "nobody":
            server.close()
        code, said, took_s = refusal("--ray-address", address)
    assert code == 2
    assert f"--ray-address: {'no' if kind == 'nobody' else 'the'} Ray" in said
    assert address in said
    assert "Traceback" not in said
    assert took_s < CONNECT_S
