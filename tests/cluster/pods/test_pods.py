"""What `moonshard manifests` writes runs: the commands of its pods, each in a network of its own, answer a request."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from moonshard.serving import cli
from moonshard.serving.config.tenants import hash_key
from moonshard.serving.control.sampling_parameters import Sampling
from tests.agreement import assert_drawn_from, reference
from tests.certificates import Authority, needs_openssl
from tests.cluster.conftest import BLOCK_BYTES, FIXTURE, NUM_SLAB_SLOTS
from tests.cluster.pods.sandbox import Object, running, why_not
from tests.engine_room import long_text
from tests.sizes import SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster"), pytest.mark.timeout(900), needs_openssl]
NAMESPACE = "models"
PROMPT = long_text(150, seed=7)
API_KEY = "a-long-and-random-key"
ASK = """
import json, sys
from moonshard.rpc.client import Client
import httpx
prompt = json.loads(sys.argv[1])
with Client("moonshard-gateway.models.svc:50051", api_key=sys.argv[2], timeout_s=120) as client:
    answer = client.generate(prompt, temperature=0, max_tokens=20, ignore_eos=True)
metrics = httpx.get("http://moonshard-gateway.models.svc:8000/metrics").text
refused = httpx.post("http://moonshard-gateway.models.svc:8000/v1/completions", json={"prompt": prompt})
print(json.dumps([answer.choices[0].token_ids, metrics, refused.status_code]))
"""


def manifests(folder: Path, *more: str) -> list[Object]:
    """All objects of a deployment with secrets, unlike meshes and two decode workers."""
    (folder / "cluster.key").write_text("k" * 40)
    (folder / "cluster.key").chmod(0o600)
    (folder / "tenants.toml").write_text(f'[keys]\n"{hash_key(API_KEY)}" = "my-team"\n')
    domains = [f"*.moonshard-{role}.{NAMESPACE}.svc" for role in ("prefill", "decode")]
    tls = Authority(folder, "ca").issue("pods", names=domains)
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
        "decode.replicas": 2,
        "kv.ports": "[16000, 16007]",
        "kv.network_fence": "a bridge of its own",
        "kv.slab_bytes": NUM_SLAB_SLOTS * BLOCK_BYTES,
        "routing.local_prefill": "static",  # the prompt is handed over
    }
    argv = ["manifests", "--out", str(folder / "out"), "--secrets", str(folder / "out" / "secrets.yaml")]
    argv += ["--image", "moonshard:1", "--namespace", NAMESPACE, "--volume", "/srv/models=models", *more]
    assert cli.main(argv + [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]) == 0
    return [each for path in sorted((folder / "out").iterdir()) for each in yaml.safe_load_all(path.read_text())]


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
@pytest.mark.parametrize("transport", ["mooncake", "grpc"])
def test_a_request_is_answered_by_pods_that_know_each_other_by_name(tmp_path: Path, transport: str):
    if reason := why_not():
        pytest.skip(reason)
    objects = manifests(tmp_path, "--set", f"kv.transport={transport}")
    (tmp_path / "pods").mkdir()
    with running(tmp_path / "pods", objects, {"models": FIXTURE.parent}) as cluster:
        gateway = cluster.pods["moonshard-gateway-0"]
        assert len(cluster.pods) == 4
        done = gateway.run("python", "-c", ASK, json.dumps(PROMPT), API_KEY, timeout_s=180)
        assert done.returncode == 0, done.stderr.decode() + gateway.log()
        tokens, metrics, status_without_key = json.loads(done.stdout)
        assert_drawn_from(reference(), PROMPT, tokens, Sampling(temperature=0.0))
        handed_over = [line for line in metrics.splitlines() if line.startswith("moonshard_request_handoffs_total")]
        assert sum(float(line.rpartition(" ")[2]) for line in handed_over) == 1
        assert status_without_key == 401
        codes = {name: pod.terminate() for name, pod in reversed(cluster.pods.items())}
        assert set(codes.values()) == {0}, {name: pod.log() for name, pod in cluster.pods.items()}
