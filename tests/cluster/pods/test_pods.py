"""What `moonshard manifests` writes runs: the commands of its pods, each in a network of its own, answer a request."""

import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import yaml

from moonshard.serving import cli
from moonshard.serving.config.tenants import hash_key
from moonshard.serving.control.sampling_parameters import Sampling
from tests.agreement import assert_drawn_from, reference
from tests.certificates import Authority, needs_openssl
from tests.cluster.conftest import BLOCK_BYTES, FIXTURE, NUM_SLAB_SLOTS
from tests.cluster.pods.controllers import Object
from tests.cluster.pods.sandbox import Cluster, Pod, running, terminated, why_not
from tests.engine_room import long_text
from tests.sizes import SETTINGS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("cluster"),
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's"),
    needs_openssl,
]
NAMESPACE = "models"
PROMPT = long_text(150, seed=7)
API_KEY = "a-long-and-random-key"
GANGS = {"prefill.processes": 2, "decode.processes": 2, "worker.gang_timeout_s": 20.0, "gateway.registry": "grpc"}
NOTICED_WITHIN_S = 15.0
ASK = """
import json, sys
from moonshard.rpc.client import Client
import httpx
prompt, host = json.loads(sys.argv[1]), sys.argv[3]
with Client(f"{host}:50051", api_key=sys.argv[2], timeout_s=120) as client:
    answer = client.generate(prompt, temperature=0, max_tokens=20, ignore_eos=True)
metrics = httpx.get(f"http://{host}:8000/metrics").text
refused = httpx.post(f"http://{host}:8000/v1/completions", json={"prompt": prompt})
print(json.dumps([answer.choices[0].token_ids, metrics, refused.status_code]))
"""


def manifests(
    folder: Path, *options: str, names: tuple[str, ...] = (), changed: Mapping[str, object] = MappingProxyType({})
) -> list[Object]:
    """All objects of a deployment with secrets and unlike meshes. `names`: further ones of its certificate."""
    (folder / "cluster.key").write_text("k" * 40)
    (folder / "cluster.key").chmod(0o600)
    (folder / "tenants.toml").write_text(f'[keys]\n"{hash_key(API_KEY)}" = "my-team"\n')
    domains = [f"*.moonshard-{role}.{NAMESPACE}.svc" for role in ("prefill", "decode")]
    tls = Authority(folder, "ca").issue("pods", names=[*domains, *names])
    keys = {
        **SETTINGS,
        "model.path": "/srv/models/kimi_k2",
        "cluster.key_file": folder / "cluster.key",
        "gateway.keys": folder / "tenants.toml",
        "tls.cert": tls.cert,
        "tls.key": tls.key,
        "tls.ca": tls.ca,
        "prefill.mesh": "{tensor = 2}",
        "decode.mesh": "{expert = 2}",
        "kv.ports": "[16000, 16007]",
        "kv.network_fence": "a bridge of its own",
        "kv.slab_bytes": NUM_SLAB_SLOTS * BLOCK_BYTES,
        "routing.local_prefill": "static",  # the prompt is handed over
        **changed,
    }
    argv = ["manifests", "--out", str(folder / "out"), "--secrets", str(folder / "out" / "secrets.yaml")]
    argv += ["--image", "moonshard:1", "--namespace", NAMESPACE, "--volume", "/srv/models=models", *options]
    assert cli.main(argv + [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]) == 0
    return [each for path in sorted((folder / "out").iterdir()) for each in yaml.safe_load_all(path.read_text())]


def assert_answers(pod: Pod, host: str, *, num_handoffs: int = 1) -> None:
    """The gateway of the pod, at `host`, says what the reference says, to those it knows, and KV was handed over for
    each request until now.
    """
    done = pod.run("python", "-c", ASK, json.dumps(PROMPT), API_KEY, host, timeout_s=180)
    assert done.returncode == 0, done.stderr.decode() + pod.log()
    tokens, metrics, status_without_key = json.loads(done.stdout)
    assert_drawn_from(reference(), PROMPT, tokens, Sampling(temperature=0.0))
    handed_over = [line for line in metrics.splitlines() if line.startswith("moonshard_request_handoffs_total")]
    assert sum(float(line.rpartition(" ")[2]) for line in handed_over) == num_handoffs
    assert status_without_key == 401


def assert_ends_in_order(cluster: Cluster) -> None:
    codes = terminated(cluster.pods.values())
    assert set(codes.values()) == {0}, {name: pod.log() for name, pod in cluster.pods.items()}


@pytest.fixture
def pods(tmp_path: Path) -> Path:
    """A folder for them, where there can be any."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path / "pods"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("transport", ["mooncake", "grpc"])
def test_a_request_is_answered_by_pods_that_know_each_other_by_name(tmp_path: Path, pods: Path, transport: str):
    objects = manifests(tmp_path, changed={"kv.transport": transport, "decode.replicas": 2})
    with running(pods, objects, {"models": FIXTURE.parent}) as cluster:
        assert len(cluster.pods) == 4
        assert_answers(cluster.pods["moonshard-gateway-0"], f"moonshard-gateway.{NAMESPACE}.svc")
        assert_ends_in_order(cluster)


@pytest.mark.parametrize("transport", ["mooncake", "grpc"])
def test_gangs_of_pods_that_register_answer_and_come_back_as_one(tmp_path: Path, pods: Path, transport: str):
    """Of unlike meshes, before two gateways. A follower that is killed costs its gang, and nobody else."""
    changed = {**GANGS, "kv.transport": transport}
    objects = manifests(tmp_path, "--gateways", "2", names=(f"moonshard-registry.{NAMESPACE}.svc",), changed=changed)
    with running(pods, objects, {"models": FIXTURE.parent}) as cluster:
        gateways = [pod for name, pod in cluster.pods.items() if name.startswith("moonshard-gateway-")]
        prefill, decode = ([f"moonshard-{role}-0", f"moonshard-{role}-0-1"] for role in ("prefill", "decode"))
        assert cluster.pods.keys() == {*(pod.name for pod in gateways), *prefill, *decode}
        for gateway in gateways:
            assert_answers(gateway, gateway.address)
        kept = [*gateways, *(cluster.pods[name] for name in prefill)]
        leader, follower = lost = [cluster.pods[name] for name in decode]
        follower.send(signal.SIGKILL)
        assert leader.wait_ended(NOTICED_WITHIN_S) != 0
        cluster.recreate("moonshard-decode-0")
        assert {cluster.pods[name].address for name in decode}.isdisjoint(pod.address for pod in lost)
        for gateway in gateways:
            gateway.wait_ready()
            assert_answers(gateway, gateway.address, num_handoffs=2)
        assert all(cluster.pods[pod.name] is pod and pod.is_running for pod in kept)
        assert_ends_in_order(cluster)
